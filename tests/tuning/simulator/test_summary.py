"""Figures made of a result, and its file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.tuning.simulator.tiny import make_settings, make_timing, make_trace, names, run
from tuning.simulator.result_file import COLUMNS, write_requests
from tuning.simulator.simulation import simulate


def test_figures_of_three_requests() -> None:
    """Two prompts at once, and one in the third five minutes: 20, 50 and 10 ms to the first token."""
    result = run([(0.0, 20, 3, names("a", 2)), (0.0, 30, 1, names("b", 3)), (700.0, 10, 2, ["c"])])
    figures = result.summary()
    assert figures["ttft_mean_s"] == pytest.approx(0.080 / 3)
    assert figures["ttft_p50_s"] == pytest.approx(0.020)
    assert figures["ttft_p99_s"] == pytest.approx(0.050)
    assert figures["ttft_worst_window_s"] == pytest.approx(0.035)
    assert [figures["tpot_mean_s"], figures["itl_p99_s"]] == pytest.approx([0.010, 0.010])
    assert figures["e2e_worst_window_s"] == pytest.approx((0.040 + 0.050) / 2)
    assert figures["makespan_s"] == pytest.approx(700.020)
    assert figures["requests_per_s"] == pytest.approx(3 / 700.020)
    assert figures["output_tokens_per_s"] == pytest.approx(6 / 700.020)
    assert figures["tokens_per_s"] == pytest.approx(66 / 700.020)
    assert (figures["prompt_tokens"], figures["token_hit_ratio"]) == (60, 0)


def test_a_request_that_comes_after_an_age_takes_no_memory_for_the_time_before() -> None:
    figures = run([(0.0, 20, 3, names("a", 2)), (9e16, 10, 2, ["c"])]).summary()
    assert figures["ttft_worst_window_s"] == pytest.approx(0.020)
    assert figures["completed_requests"] == 2


def test_percentiles_are_of_single_tokens() -> None:
    """The first answers with 200 tokens at 10 ms each; the second one's only gap is of 25 ms, for its hand-over."""
    trace = make_trace([(0.0, 10, 201, ["a"]), (10.0, 100, 2, names("b", 10))])
    result = simulate(trace, make_timing(), make_settings(dram_read_bytes_per_s=1e5 / 0.015))
    assert np.repeat(result.gap_s, result.gap_count).sum() == pytest.approx(200 * 0.010 + 0.0015 + 0.025)
    assert result.summary()["itl_p99_s"] < 0.0101
    assert result.gap_s.max() == pytest.approx(0.025)


def test_hits_are_counted_in_tokens_and_in_blocks() -> None:
    figures = run([(0.0, 100, 1, names("a", 10)), (1.0, 100, 1, names("a", 10))]).summary()
    assert figures["token_hit_ratio"] == pytest.approx(99 / 200)
    assert figures["block_hit_ratio"] == 0.5
    assert (figures["hit_tokens_dram"], figures["computed_tokens"]) == (99, 101)


def test_nothing_seen_is_nan() -> None:
    figures = run([(0.0, 100, 1, names("a", 10))], device_pool_blocks=5).summary()
    assert (figures["completed_requests"], figures["refused_requests"]) == (0, 1)
    assert all(
        math.isnan(figures[name]) for name in ("ttft_mean_s", "ttft_worst_window_s", "itl_p50_s", "tokens_per_s")
    )


def test_busy_shares() -> None:
    """100 ms of prefill and two steps of 10 ms of decode, in 120 ms."""
    shares = [instance.busy_share for instance in run([(0.0, 100, 3, names("a", 10))]).instances]
    assert shares == pytest.approx([100 / 120, 20 / 120])


def test_a_result_as_a_file(tmp_path: Path) -> None:
    result = run([(0.0, 100, 3, names("a", 10)), (0.1, 30, 1, names("b", 3))], device_pool_blocks=5)
    write_requests(result, tmp_path / "requests.parquet")
    table = pq.read_table(tmp_path / "requests.parquet")
    assert table.column_names == list(COLUMNS)
    assert table["end_s"].to_pylist() == [None, pytest.approx(0.130)]
    assert table["computed_tokens"].to_pylist() == [0, 30]
