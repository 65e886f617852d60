from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.metrics import ServiceLevel, attains, percentile, summarise, tpot_s, ttft_s
from load_tests.request_record import RequestRecord


def record(scheduled_s: float, sent_s: float, chunk_s: list[float], ended_s: float, **fields: Any) -> RequestRecord:
    return RequestRecord(
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        chunk_s=chunk_s,
        ended_s=ended_s,
        **{"wanted_output_tokens": 4, **fields},
    )


# Two requests that succeed, one that fails in mid-stream, one closed by the client:
#
#   time  10   11   12   13   14   15   16   17   18   19   20
#   A      S----1----2---------3---------4|                      TTFT 1, gaps 1 2 2
#   B           S---------1----2----3|                           TTFT 2, gaps 1 1; sent 0.5 late; asked 4, got 3
#   C                S----1X                                     failed
#   D                                              S----1---X    aborted, ended at 20
RUN = [
    record(10, 10, [11, 12, 14, 16], 16, prompt_tokens=100, output_tokens=4, cached_prompt_tokens=64),
    record(11, 11.5, [13, 14, 15], 15, prompt_tokens=50, output_tokens=3),
    record(12, 12, [13], 13.5, error="E: lost", output_tokens=1),
    record(19, 19, [19.5], 20, aborted=True),
]


def test_a_run_computed_by_hand() -> None:
    summary = summarise(RUN)
    assert (summary.requests, summary.failed, summary.aborted, summary.short) == (4, 1, 1, 1)
    assert (summary.prompt_tokens, summary.output_tokens, summary.chunks) == (150, 7, 7)
    assert summary.cached_prompt_tokens == 64
    assert summary.makespan_s == 10
    assert summary.ttft_s.mean == 1.5
    assert summary.ttft_s.p50 == 1.5
    # TPOT: (16 - 11) / 3 and (15 - 13) / 2.
    assert summary.tpot_s.count == 2
    assert summary.tpot_s.mean == pytest.approx((5 / 3 + 1) / 2)
    # ITL over all gaps 1 2 2 1 1, not over the requests' means 5/3 and 1.
    assert summary.itl_s.count == 5
    assert summary.itl_s.mean == pytest.approx(1.4)
    assert summary.itl_s.p50 == 1.0
    assert summary.itl_s.p90 == 2.0
    assert summary.latency_s.mean == 5.0
    # Lateness 0 0.5 0 0, whoever failed.
    assert summary.lateness_s.count == 4
    assert summary.lateness_s.mean == 0.125
    assert summary.lateness_s.p99 == pytest.approx(0.5 * 0.97)
    assert summary.errors == ("E: lost",)
    assert summary.slo_attained is None


def test_rows_have_rates_and_milliseconds() -> None:
    row = summarise(RUN, ServiceLevel(ttft_s=1.5, tpot_s=2.0)).as_row()
    assert row["output_tokens_per_s"] == 0.7
    assert row["total_tokens_per_s"] == 15.7
    assert row["requests_per_s"] == 0.2
    assert row["ttft_mean_ms"] == 1500.0
    assert row["itl_p90_ms"] == 2000.0
    assert row["lateness_p99_ms"] == 485.0
    assert row["tokens_per_chunk"] == 1.0
    # Only A is within both limits, of four requests.
    assert row["slo_attainment"] == 0.25
    assert row["goodput_requests_per_s"] == 0.1
    assert row["errors"] == "E: lost"


def test_one_stall_shows_in_the_itl_and_hardly_in_the_tpot() -> None:
    steady = [record(0, 0, [float(i) for i in range(101)], 100, output_tokens=101) for _ in range(9)]
    stalled = record(0, 0, [*(float(i) for i in range(100)), 149.0], 149, output_tokens=101)
    summary = summarise([*steady, stalled])
    assert summary.tpot_s.p50 == 1.0
    # One gap of 50 among 1,000: rank 999 of 0..999 is 50, rank 998 is 1.
    assert summary.itl_s.p99 == 1.0
    assert summary.itl_s.mean == pytest.approx((999 * 1 + 50) / 1000)


@pytest.mark.parametrize(
    ("ttft", "tpot", "fields", "attained"),
    [
        (1.0, 0.1, {}, True),
        (1.01, 0.1, {}, False),
        (1.0, 0.11, {}, False),
        (1.0, 0.1, {"error": "x"}, False),
        (1.0, 0.1, {"aborted": True}, False),
    ],
)
def test_a_request_attains_only_within_both_limits(
    ttft: float, tpot: float, fields: dict[str, Any], attained: bool
) -> None:
    served = record(0, 0, [ttft, ttft + 10 * tpot], 9, output_tokens=11, **fields)
    assert attains(served, ServiceLevel(ttft_s=1.0, tpot_s=0.1 + 1e-12)) is attained


def test_a_chunk_may_carry_several_tokens() -> None:
    summary = summarise([record(0, 0, [1, 3], 3, output_tokens=8)])
    assert summary.tokens_per_chunk == 4
    assert summary.itl_s.mean == 2
    assert summary.tpot_s.mean == pytest.approx(2 / 7)


def test_answers_without_a_rate_per_token() -> None:
    one_token = record(0, 0, [1], 1, output_tokens=1)
    one_chunk = record(0, 0, [1], 1, output_tokens=8)
    assert tpot_s(one_token) is None
    assert tpot_s(one_chunk) is None
    assert attains(one_token, ServiceLevel(ttft_s=1, tpot_s=0))
    assert ttft_s(record(0, 0, [], 1)) is None


def test_without_usage_each_chunk_is_a_token() -> None:
    summary = summarise([record(0, 0, [1, 2, 3], 3)])
    assert summary.output_tokens == 3
    assert summary.tpot_s.mean == 1
    assert summary.cached_prompt_tokens is None


def test_a_run_without_success_has_no_latencies_and_no_nan() -> None:
    row = summarise([record(0, 0, [], 2, error="refused")]).as_row()
    assert row["failed"] == 1
    assert row["output_tokens_per_s"] == 0
    assert row["ttft_mean_ms"] is None
    assert row["tokens_per_chunk"] is None
    assert summarise([]).as_row()["output_tokens_per_s"] is None


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    share=st.floats(0, 1),
)
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)
