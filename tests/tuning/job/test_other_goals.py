"""A study judged by other goals than it was searched for: points stay, their worth changes, nothing is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.tuning.job.job_runs import arguments, found_by, make_files, run
from tuning.job.job import CHOSEN, NOTHING_FEASIBLE, UNUSABLE, main
from tuning.report.content import JobReport

FEW = ("--evaluations", "6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("goals")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def first(folder: Path) -> JobReport:
    """Of a search with a limit of the mean."""
    status, report = run(folder, *FEW, "--slo", "mean", "--slo-ttft-s", "100")
    assert status == CHOSEN
    return report


def rows(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "out" / "front.parquet").to_pylist()  # type: ignore[no-any-return]


def test_other_limits_are_those_of_the_figures_that_are_there(
    folder: Path, first: JobReport, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = (folder / "out" / "study.journal").read_bytes()
    prices = sorted(row["cost_per_hour"] for row in rows(folder))
    limit = (prices[2] + prices[3]) / 2
    more = ("--evaluations", "60", "--budget-per-hour", str(limit), "--ttft", "p99")
    status, report = run(folder, *more)
    assert status == CHOSEN
    said = "was searched for other goals: the 6 points that it evaluated are judged by these, and none is added"
    assert said in capsys.readouterr().err
    assert any(said in warning for warning in report.warnings)
    assert said in (folder / "out" / "serve_config.yaml").read_text()
    assert (folder / "out" / "study.journal").read_bytes() == journal

    assert [each.point for each in report.points] == [each.point for each in first.points]
    assert [each.figures for each in report.points] == [each.figures for each in first.points]
    table = rows(folder)
    assert [row["feasible"] for row in table] == [row["cost_per_hour"] <= limit for row in table]
    assert sum(row["feasible"] for row in table) == 3
    assert [row["ttft_p99_s"] for row in table] == [each.objectives[0] for each in report.points]
    assert report.choice.chosen is not None
    allowed = [row for row in table if row["feasible"]]
    fastest = min(allowed, key=lambda row: (row["ttft_p99_s"], row["cost"]))
    assert report.points[report.choice.chosen].point == {name: fastest[name] for name in ("dram_gib", "disk_gib")}


def test_a_point_is_worth_what_a_search_for_these_goals_says(folder: Path, first: JobReport) -> None:
    more = ("--slo", "p99", "--slo-ttft-s", "7", "--slo-tpot-s", "0.1")
    _, anew = run(folder, *FEW, *more)
    _, searched = run(folder, *FEW, *more, out="searched")
    known = {tuple(each.point.values()): each for each in searched.points}
    both = [(each, known[key]) for each in anew.points if (key := tuple(each.point.values())) in known]
    assert len(both) >= 4
    for mine, other in both:
        assert (mine.objectives, mine.slo_values, mine.figures) == (other.objectives, other.slo_values, other.figures)


def test_goals_that_nothing_keeps_and_the_first_ones_again(
    folder: Path, first: JobReport, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _ = run(folder, *FEW, "--budget-per-hour", "1")
    assert status == NOTHING_FEASIBLE
    assert "none of 6 points keeps the limits. The closest is " in capsys.readouterr().err
    status, _ = run(folder, *FEW, "--budget-per-hour", "3.5")
    assert status == CHOSEN
    assert "48 GiB of DRAM (over a limit), with" in capsys.readouterr().out  # 3.60 an hour
    status, again = run(folder, *FEW, "--slo", "mean", "--slo-ttft-s", "100")
    assert status == CHOSEN
    assert found_by(again) == found_by(first)


def test_what_was_killed_before_its_first_point_has_nothing_to_judge(
    folder: Path, first: JobReport, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "begun"
    out.mkdir()
    (out / "inputs.json").write_bytes((folder / "out" / "inputs.json").read_bytes())
    assert main(arguments(folder, *FEW, "--budget-per-hour", "5", out="begun")) == UNUSABLE
    assert "nothing was evaluated in it that could be judged" in capsys.readouterr().err
