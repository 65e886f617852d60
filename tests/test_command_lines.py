"""Every `python -m` entry: --help with an example, and exit statuses that scripts can tell apart."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("app", "actors", "kv", "migrate", "tuning", "load_tests")
NO_ENTRIES = {"load_tests.vidur_run", "app.grammar_child", "actors.random_model"}
"""Started by `load_tests.beside_vidur` alone, by its file, in a Python that has none of our packages; started by
`app.grammar_check` alone; and what people run as `load_tests.make_tiny_model`."""


def entries() -> list[str]:
    found = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.add(".".join(parts[:-1] if parts[-1] == "__main__" else parts))
    return sorted(found - NO_ENTRIES)


# The module may have been imported by another test, whose copy is left alone.
pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")


def status(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """How `python -m name` ends with these arguments."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", entries())
def test_help_names_the_command_and_has_an_example(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert status(name, ["--help"], monkeypatch) == 0
    printed = capsys.readouterr()
    usage, _, rest = printed.out.partition("\n\n")
    assert usage.startswith(f"usage: python -m {name} ")
    assert f"python -m {name}" in " ".join(rest.split())
    assert printed.err == ""


@pytest.mark.parametrize("name", entries())
def test_an_option_that_there_is_not_ends_with_2_and_says_so_on_stderr(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(name, ["--no-such-option"], monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("usage: ")
    assert len(printed.err.splitlines()[-1]) < 500


def test_they_are_found() -> None:
    assert {"app.check", "app.cluster_check", "kv.inspect", "load_tests.run", "tuning.job"} <= set(entries())


@pytest.mark.parametrize("name", entries())
def test_all_end_in_one_way_when_their_output_cannot_be_written(name: str) -> None:
    source = ROOT / name.replace(".", "/")
    path = source / "__main__.py" if source.is_dir() else source.with_suffix(".py")
    assert path.read_text(encoding="utf-8").endswith("sys.exit(status_of(main))\n")
