from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.overlay import merged_with_overlay
from app.settings_error import SettingsError
from app.yaml_mapping import read_yaml


def read(folder: Path, text: str) -> Any:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path, "file.yaml", "name another")


def test_every_repeated_key_is_told_with_its_place_and_lines(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, "a: 1\nb:\n  - c: 1\n    'c': 2\na: 3\n")
    assert sorted(raised.value.problems) == [
        "file.yaml: a: given twice, in line 1 and in line 5; keep one of them",
        "file.yaml: b.0.c: given twice, in line 3 and in line 4; keep one of them",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "a: {k: 1}\nb: {k: 2}\n",
        "base: &x {k: 1, l: 2}\nover: {<<: *x, k: 3}\nsame: *x\n",
        "[1, {a: null}, 2026-01-01]",
        "'1': a\n1: b\n",
    ],
)
def test_anything_else_is_read_as_yaml_reads_it(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == yaml.safe_load(text)


def laughs(first: str, rest: str, times: int = 10) -> str:
    """A few lines that stand for 9**times the first."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} " + rest.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, times + 1)]
    return "\n".join(lines)


def chain(length: int) -> str:
    """Flat on the page."""
    return "\n".join(["a0: &a0 1", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, length))])


@pytest.mark.parametrize("text", [laughs("[x]", "[{}]"), laughs("{k: x}", "{{<<: [{}]}}"), "&a\nk: *a\n", "&a [[*a]]"])
def test_what_stands_for_too_much_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"file\.yaml can't be used: it holds more than 100000 values"):
        read(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["[" * 3000, "[" * 101 + "]" * 101, "{k: " * 150 + "1" + "}" * 150, chain(200), chain(5000)]
)
def test_what_is_nested_too_deeply_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"file\.yaml can't be used: it is nested more than 100 levels deep"):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["[" * 99 + "1" + "]" * 99, chain(98), laughs("[x]", "[{}]", times=4)])
def test_what_is_large_is_read(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: [", "a: 1\n---\na: 2\n", "a: !!python/name:os.system x", "? [1]\n: 2", "\x07"])
def test_what_is_no_plain_yaml_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"file\.yaml is not YAML"):
        read(tmp_path, text)


def test_an_overlay_is_held_to_the_same(tmp_path: Path) -> None:
    path = tmp_path / "overlay.yaml"
    path.write_text("engine: {device: cpu}\nengine: {block_tokens: 16}\n")
    with pytest.raises(SettingsError, match=r"overlay .*overlay\.yaml .*engine: given twice, in line 1 and in line 2"):
        merged_with_overlay({}, path)
