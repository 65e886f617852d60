from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actors.model_cache import build_once, cache_root


def _complete(folder: Path) -> bool:
    return (folder / "a").exists() and (folder / "b").exists()


def _build(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


_RACER = """
import os, pathlib, sys, time
from actors.model_cache import build_once
root, mine, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]

def build(folder):
    (folder / "a").write_text(mine)
    deadline = time.monotonic() + 60
    while not (root / other).exists() and time.monotonic() < deadline:   # both must have asked before one is done
        time.sleep(0.01)
    (folder / "b").write_text(mine)
    with (root / "log").open("a") as log:
        log.write(mine + "\\n")

(root / mine).touch()
folder = build_once(root / "model", build, lambda f: (f / "a").exists() and (f / "b").exists())
print((folder / "a").read_text(), (folder / "b").read_text())
"""


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACER, str(tmp_path), *names], stdout=subprocess.PIPE, text=True)
        for names in (("first", "second"), ("second", "first"))
    ]
    answers = [racer.communicate(timeout=120)[0].split() for racer in racers]
    builders = (tmp_path / "log").read_text().split()
    assert len(builders) == 1
    assert answers == [[builders[0], builders[0]]] * 2


def test_what_a_killed_builder_left_is_never_used(tmp_path: Path) -> None:
    killed = (
        "import os, pathlib, sys; from actors.model_cache import build_once\n"
        "def build(folder):\n    (folder / 'a').write_text('half'); os._exit(9)\n"
        "build_once(pathlib.Path(sys.argv[1]), build, lambda f: (f / 'a').exists() and (f / 'b').exists())\n"
    )
    folder = tmp_path / "model"
    assert subprocess.run([sys.executable, "-c", killed, str(folder)], check=False, timeout=60).returncode == 9
    assert any("partial" in entry.name for entry in tmp_path.iterdir())  # the half-written folder is there ...
    assert not folder.exists()

    assert build_once(folder, _build, _complete) == folder
    assert (folder / "a").read_text() == "a"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "model.lock"]  # ... and gone now


def test_a_damaged_folder_is_made_again(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "model", _build, _complete)
    (folder / "b").unlink()
    build_once(folder, _build, _complete)
    assert _complete(folder)


def test_a_failing_build_leaves_nothing_and_passes_its_error_on(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail, _complete)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.lock"]


def test_a_build_that_is_not_complete_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="not complete"):
        build_once(tmp_path / "model", lambda folder: (folder / "a").touch(), _complete)
    assert not (tmp_path / "model").exists()


def test_others_may_read_what_was_built(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        _build(folder)
        (folder / "b").chmod(0o600)

    folder = build_once(tmp_path / "model", build, _complete)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert (folder / "b").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [("/own", "/xdg", "/own"), (None, "/xdg", "/xdg/equipoise"), (None, None, "HOME/.cache/equipoise")],
)
def test_where_the_cache_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, xdg: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("EQUIPOISE_CACHE", own), ("XDG_CACHE_HOME", xdg)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected.replace("HOME", str(tmp_path)))
    assert cache_root("/given") == Path("/given")
