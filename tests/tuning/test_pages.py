"""What the tuner's pages and help say to somebody who comes new."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tuning.hardware_profile import read_hardware
from tuning.job.axes import choice_axis, numeric_axis, ttl_axis
from tuning.job.job import CHOSEN, INTERRUPTED, NOTHING_FEASIBLE, UNUSABLE
from tuning.job.options import make_parser
from tuning.model_config import read_model_shape
from tuning.pareto.space import CategoricalAxis, NumericAxis
from tuning.price_book import read_prices

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("traces", "tuning-job", "tuning-report", "group-ttl", "pareto-search", "simulator")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_how_its_commands_are_run_before_the_first(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    # In a block or a sentence of the page; the first sentence may name its subject.
    first = [found.start() for found in re.finditer(r"^ +python -m|^python -m|^`python -m", text, re.MULTILINE)]
    said = text.find("with its virtual environment active (`source .venv/bin/activate`)")
    assert said != -1
    if name != "tuning-job":
        assert said < min(first)
    else:
        assert said < text.index("```sh")


def test_the_exit_statuses_of_the_job_stand_in_a_table() -> None:
    text = (DOCS / "tuning-job.md").read_text(encoding="utf-8")
    header = next(line for line in text.splitlines() if line.startswith("| command | 0"))
    assert [int(cell) for cell in header.split("|")[2:-1]] == [CHOSEN, NOTHING_FEASIBLE, UNUSABLE, INTERRUPTED]


def test_the_forms_of_axes_in_the_help_are_those_that_are_taken() -> None:
    text = make_parser().format_help()
    forms = re.findall(r"^  (\S+) {3,}", text.split("what an AXIS may be:")[1].split("example:")[0], re.MULTILINE)
    assert forms == ["512", "0:2048:512/16", "1:8:1", "none", "lru", "lru,lfu"]
    assert numeric_axis("x", forms[0], 10**6) == 512
    searched = numeric_axis("x", forms[1], 10**6)
    assert isinstance(searched, NumericAxis)
    assert (searched.coarse, searched.step) == ((0, 512, 1024, 1536, 2048), 16)
    both = numeric_axis("x", forms[2], 10**6)
    assert isinstance(both, NumericAxis)
    assert (both.coarse[0], both.coarse[-1], both.step) == (1, 8, 1)
    assert ttl_axis("x", forms[3]) is None
    assert choice_axis("x", forms[4], ("lru", "lfu")) == "lru"
    assert choice_axis("x", forms[5], ("lru", "lfu")) == CategoricalAxis("x", ("lru", "lfu"))


@pytest.mark.parametrize(
    ("option", "read"), [("--model", read_model_shape), ("--hardware", read_hardware), ("--prices", read_prices)]
)
def test_the_names_in_the_help_are_those_that_are_taken(option: str, read: Callable[[str], object]) -> None:
    (action,) = (each for each in make_parser()._actions if option in each.option_strings)
    assert action.help is not None
    names = action.help.partition(";")[0].split(", ")
    assert len(names) >= 2
    for name in names:
        read(name)
    with pytest.raises(ValueError, match=re.escape(", ".join(names))):
        read("none-of-these")
