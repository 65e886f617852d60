from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tuning.figure_file import FigureError, FigureFileError, find_figure_file, read_figure_file


@dataclass(frozen=True)
class Inner:
    low: int
    high: int = 9

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise FigureError("low", f"{self.low} is above high")


@dataclass(frozen=True)
class Outer:
    name: str
    rate: float
    inner: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] | None = None

    def __post_init__(self) -> None:
        if len(self.inner) > 2:
            raise FigureError("inner.2", "one too many")
        if self.rate == 13:
            raise ValueError("13 is unlucky")


def test_all_kinds_of_values(tmp_path: Path) -> None:
    text = "name: 2026-11-29\nrate: 3e9\ninner:\n  - {low: 1_000, high: 85.9e9}\nby_name: {a: {low: 2}}\n"
    assert read(tmp_path, text) == Outer("2026-11-29", 3e9, (Inner(1000, 85_900_000_000),), {"a": Inner(2)})
    assert read(tmp_path, "name: x\nrate: 2\nby_name: null\n") == Outer("x", 2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n", r"line 1: 'rate' is missing; required and allowed: name, rate, inner, by_name"),
        ("name: x\nrate: 1\nrat: 2\n", r"line 3: rat: unknown key; allowed: name, rate, inner, by_name"),
        ("name: x\nrate: 1\n\nrate: 2\n", r"line 2: rate: given twice, here and in line 4; keep one"),
        ("name: x\nrate: fast\n", r"line 2: rate: given 'fast'; allowed: a number"),
        ("name: x\nrate: '1'\n", r"line 2: rate: given '1'; allowed: a number"),
        ("name: x\nrate: yes\n", r"line 2: rate: given 'yes'; allowed: a number"),
        ("name: 7\nrate: 1\n", r"line 1: name: given '7'; allowed: text"),
        ("name: x\nrate: [1]\n", r"line 2: rate: given a list; allowed: a number"),
        ("name: x\nrate: 1\ninner: {low: 1}\n", r"line 3: inner: given a mapping; allowed: a list"),
        ("name: x\nrate: 1\ninner:\n  - low: 1\n  - low: 1.5\n", r"line 5: inner.1.low: given '1.5'; allowed: a whole"),
        ("name: x\nrate: 1\ninner:\n  - low: .inf\n", r"line 4: inner.0.low: given '.inf'; allowed: a whole number"),
        ("name: x\nrate: 1\ninner: [3]\n", r"line 3: inner.0: given '3'; allowed: a mapping with low, high"),
        ("name: x\nrate: 1\nby_name:\n  a:\n    low: 10\n", r"line 5: by_name.a.low: 10 is above high"),
        ("name: x\nrate: 13\n", r"line 1: 13 is unlucky"),
        ("name: x\nrate: 1\ninner:\n  - low: 1\n  - low: 2\n  - low: 3\n", r"line 6: inner.2: one too many"),
        ("- 1\n", r"line 1: given a list; allowed: a mapping with name"),
        ("<<: {name: x}\nrate: 1\n", r"line 1: <<: unknown key"),
        ("name: x\nrate: " + "9" * 400 + "\n", r"line 2: rate: given '9{77}\.\.\.'; allowed: a number below 2\^63"),
        ("name: x\nrate: " + "9" * 5000 + "\n", r"line 2: rate: given '9{77}\.\.\.'; allowed: a number below 2\^63"),
        (
            "name: x\nrate: 1\ninner:\n  - low: " + "9" * 19 + "\n",
            r"line 4: inner.0.low: .* a whole number below 2\^63",
        ),
        ("name: x\nrate: 1\ninner:\n  - low: 1e300\n", r"line 4: inner.0.low: given '1e300'; allowed: a whole number"),
        ("name: " + "[" * 5000 + "\n", r"is nested too deeply"),
        ("", r"is empty: it must have name, rate"),
        ("name: [\n", r"is not YAML"),
        ("a: 1\n---\nb: 2\n", r"is not YAML"),
    ],
)
def test_what_is_refused_is_said_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FigureFileError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(("written", "reading"), [("3:43", 223), ("-1:00.5", -60.5), ("010", 8), ("+0_17", 15)])
def test_numbers_that_yaml_reads_to_another_base_are_refused(written: str, reading: float, tmp_path: Path) -> None:
    with pytest.raises(FigureFileError) as caught:
        read(tmp_path, f"name: x\nrate: {written}\n")
    assert f"line 2: rate: given '{written}', which YAML reads as {reading:g}; allowed" in str(caught.value)


@pytest.mark.parametrize(("written", "number"), [("0", 0), ("0.125", 0.125), ("-0.5", -0.5), ("10", 10), ("00.5", 0.5)])
def test_numbers_that_begin_with_a_zero_and_are_what_they_look_like(
    written: str, number: float, tmp_path: Path
) -> None:
    assert read(tmp_path, f"name: x\nrate: {written}\n").rate == number


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(FigureFileError, match=r"missing.yaml can't be read"):
        read_figure_file(tmp_path / "missing.yaml", Outer)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FigureFileError, match=r"binary.yaml can't be read"):
        read_figure_file(tmp_path / "binary.yaml", Outer)


def test_names_and_paths(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").touch()
    assert find_figure_file("one", tmp_path) == tmp_path / "one.yaml"
    assert find_figure_file("other/two", tmp_path) == Path("other/two")
    assert find_figure_file("two.yaml", tmp_path) == Path("two.yaml")
    with pytest.raises(FigureFileError, match=r"there is no .* file named 'two': give the path of one, or one"):
        find_figure_file("two", tmp_path)


def read(folder: Path, text: str) -> Outer:
    path = folder / "figures.yaml"
    path.write_text(text, encoding="utf-8")
    return read_figure_file(path, Outer)
