from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.report.small_job import infeasible_job, small_job
from tuning.report.content import JobReport
from tuning.report.summary_file import SummaryError, dump, load, read_summary

JOB = small_job()
numbers = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    "report",
    [
        JOB,
        infeasible_job(),
        dataclasses.replace(JOB, ttl_plan=None, hit_curve=None, baseline=None, points=JOB.points[:1]),
    ],
    ids=["all there", "infeasible", "what may be left out"],
)
def test_a_saved_report_is_read_as_it_was(report: JobReport) -> None:
    assert load(dump(report)) == report


@settings(max_examples=60, deadline=None)
@given(st.text(), st.tuples(numbers, numbers, numbers), st.dictionaries(st.text(), st.text()))
def test_any_text_and_number_is_kept(text: str, values: tuple[float, float, float], versions: dict[str, str]) -> None:
    first = dataclasses.replace(JOB.points[0], objectives=values)
    report = dataclasses.replace(
        JOB, points=(first, *JOB.points[1:]), command=text, baseline_title=text, versions=versions
    )
    assert load(dump(report)) == report


def test_the_version_is_saved() -> None:
    assert json.loads(dump(JOB))["version"] == 1


def put(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of a summary: the value at a path."""

    def edit(summary: Any) -> None:
        for step in path[:-1]:
            summary = summary[step]
        summary[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("version", value=2), "version=2 is not allowed: this program reads version 1"),
        (put("version", value=True), "version=true is not allowed"),
        (lambda summary: summary.pop("version"), "no version"),
        (put("sloes", value=[]), "summary: unknown key 'sloes'"),
        (put("points", 0, "bill", "ram_per_hour", value=1.0), r"points\[0\].bill: unknown key 'ram_per_hour'"),
        (lambda summary: summary["trace"].pop("span_s"), "trace: 'span_s' is missing"),
        (put("trace", "requests", value=1.5), "trace.requests: given 1.5; allowed: a whole number"),
        (put("trace", "requests", value=True), "trace.requests: given true; allowed: a whole number"),
        (put("trace", "name", value=None), "trace.name: given null; allowed: text"),
        (put("points", 1, "on_front", value=1), r"points\[1\].on_front: given 1; allowed: true or false"),
        (put("points", 1, "point", "dram_gib", value=[1]), r"points\[1\].point.dram_gib: given \[1\]; allowed: "),
        (put("slos", 0, "kind", value="most"), r"slos\[0\].kind: given \"most\"; allowed: 'at_most' or 'at_least'"),
        (put("objectives", value=[]), r"objectives: given \[\]; allowed: a list of 3"),
        (put("axes", value={}), "axes: given {}; allowed: a list"),
        (put("versions", value=[]), r"versions: given \[\]; allowed: an object"),
        (put("trace", value=[]), r"trace: given \[\]; allowed: an object with name, "),
        (
            put("trace", "requests", value=2**63),
            r"trace.requests: given 9223372036854775808; allowed: a smaller number",
        ),
        (put("search", "wall_s", value=10**400), "search.wall_s: given 1000.*; allowed: a smaller number"),
        (put("choice", "chosen", value=4), "choice.chosen=4 is not allowed: there are 4 points"),
        (put("points", 0, "slo_values", value=[]), "3 objectives and 0 values for limits; 3 and 1 are needed"),
        (put("skipped", 0, "point", value={"dram_gib": 1}), "must have just the keys of the axes"),
        (put("hit_curve", "capacity_gib", value=[1.0]), "capacities and ratios must be equally many"),
    ],
)
def test_what_is_wrong_is_said(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    summary = json.loads(dump(JOB))
    edit(summary)
    with pytest.raises(SummaryError, match=message):
        load(json.dumps(summary))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: line 1, column 1"),
        ("[1]", "no version"),
        ("[" * 100_000, "nested too deeply"),
        ('{"version": 1, "version": 1}', "key 'version' is given twice"),
        ('{"version": ' + "9" * 5000 + "}", "a number has thousands of digits"),
        ('{"version": ' + "9" * 400 + "}", r"version=9{77}\.\.\. is not allowed"),
        ('{"version": ' + "[" * 100_000, "nested too deeply"),
        ('{"version": NaN}', "NaN is not allowed"),
        ('{"version": 1e999}', "version: the number is too large"),
    ],
)
def test_text_that_is_no_summary_is_refused(text: str, message: str) -> None:
    with pytest.raises(SummaryError, match=message):
        load(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_report_holds_finite_numbers_only(value: float) -> None:
    with pytest.raises(ValueError, match=r"trace\.span_s=(nan|inf) is not allowed"):
        dataclasses.replace(JOB, trace=dataclasses.replace(JOB.trace, span_s=value))


def test_a_file_is_named_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(SummaryError, match=r"nowhere\.json: cannot be read"):
        read_summary(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SummaryError, match=r"bad\.json: no version"):
        read_summary(tmp_path / "bad.json")
