from __future__ import annotations

from typing import Any

import pytest

from load_tests.run_tables import cpu_table, markdown_table, median_table, medians, number, shown_figures


def run(workload: str, throughput: float | None, **more: Any) -> dict[str, Any]:
    return {"workload": workload, "output_tokens_per_s": throughput, "makespan_s": 2.0, **more}


RUNS = [run("a", 30.0), run("b", 5.0), run("a", 10.0), run("a", 20.0), run("b", None)]


def test_medians_with_their_spread() -> None:
    first, second = medians(RUNS)
    assert (first["workload"], first["runs"]) == ("a", 3)
    assert first["output_tokens_per_s"] == {"median": 20.0, "min": 10.0, "max": 30.0}
    assert second["output_tokens_per_s"] == {"median": 5.0, "min": 5.0, "max": 5.0}
    assert "ttft_mean_ms" not in first


def test_runs_are_grouped_by_the_given_keys() -> None:
    runs = [run("a", 1.0, mode="x"), run("a", 2.0, mode="y")]
    assert [(record["mode"], record["workload"]) for record in medians(runs, ("mode", "workload"))] == [
        ("x", "a"),
        ("y", "a"),
    ]


def test_the_table_shows_spread_only_where_there_is_one() -> None:
    lines = median_table(RUNS).splitlines()
    assert lines[0].startswith("| workload | runs | output_tokens_per_s |")
    assert lines[2].startswith("| a | 3 | 20.00 (10.00-30.00) | - |")
    assert lines[3].startswith("| b | 2 | 5.000 | - |")
    assert len({line.count("|") for line in lines}) == 1


def test_figures_that_not_every_run_has_are_shown_when_one_has_them() -> None:
    assert "slo_attainment" not in shown_figures(RUNS)
    assert "slo_attainment" in shown_figures([*RUNS, run("a", 1.0, slo_attainment=0.5)])


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.12345, "0.1235"), (1.23456, "1.235"), (421.04, "421.0"), (12345.6, "12,346"), (0, "0")],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_bar_in_a_cell_does_not_split_it() -> None:
    assert markdown_table(["a"], [["x|y"]]).splitlines()[2] == "| x\\|y |"


def test_cpu_time_by_process_has_the_largest_first_and_leaves_out_what_is_nothing() -> None:
    runs = [
        run("a", 1.0, cpu_ms_per_output_token={"worker": 10.0, "proxy": 1.0, "idle": 0.001}),
        run("a", 1.0, cpu_ms_per_output_token={"worker": 14.0, "proxy": 1.0, "idle": 0.002}),
        run("a", 1.0, cpu_ms_per_output_token={"worker": 11.0, "proxy": 1.0, "started later": 20.0}),
        run("b", None),
    ]
    assert cpu_table(runs).splitlines()[2:] == [
        "| a | started later | 20.00 |",
        "| a | worker | 11.00 (10.00-14.00) |",
        "| a | proxy | 1.000 |",
    ]
