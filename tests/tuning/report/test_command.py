from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tuning.report.small_job import small_job
from tuning.report.__main__ import main
from tuning.report.page import html_page
from tuning.report.summary_file import dump


def test_a_saved_summary_makes_the_same_page(tmp_path: Path) -> None:
    summary, page = tmp_path / "summary.json", tmp_path / "report.html"
    summary.write_text(dump(small_job()), encoding="utf-8")
    assert main([str(summary), "--out", str(page)]) == 0
    assert page.read_text(encoding="utf-8") == html_page(small_job())


def test_a_page_is_not_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, page = tmp_path / "summary.json", tmp_path / "report.html"
    summary.write_text(dump(small_job()), encoding="utf-8")
    page.write_text("mine")
    assert main([str(summary), "--out", str(page)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert page.read_text() == "mine"
    assert main([str(summary), "--out", str(page), "--overwrite"]) == 0
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_a_number_that_no_axis_can_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, page = tmp_path / "summary.json", tmp_path / "report.html"
    job = small_job()
    _, tokens_per_s, cost = job.points[0].objectives
    first = replace(job.points[0], objectives=(1e308, tokens_per_s, cost))
    summary.write_text(dump(replace(job, points=(first, *job.points[1:]))), encoding="utf-8")
    assert main([str(summary), "--out", str(page)]) == 1
    assert capsys.readouterr().err == f"{summary}: a number is too large to be drawn: give a summary that a job wrote\n"
    assert not page.exists()


def test_a_bad_summary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, page = tmp_path / "summary.json", tmp_path / "report.html"
    summary.write_text('{"version": 1, "trace": {}}')
    assert main([str(summary), "--out", str(page)]) == 1
    assert capsys.readouterr().err.startswith(f"{summary}: ")
    assert not page.exists()
