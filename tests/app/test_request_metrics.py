"""What an ingress counts of choices, from times that are given."""

from __future__ import annotations

import math
import time

import pytest

from app.request_metrics import Ending, RequestMetrics
from app.sequence_times import SequenceTimes
from kv.metrics import table
from kv.metrics.histogram import exported_as
from kv.metrics.table import METRICS, Metric


def count(metrics: RequestMetrics, metric: Metric, *more_tags: str) -> float:
    """Over all series that have these tags."""
    return sum_of(metrics, exported_as(metric)[2], more_tags)


def total(metrics: RequestMetrics, metric: Metric) -> float:
    return sum_of(metrics, exported_as(metric)[1], ())


def sum_of(metrics: RequestMetrics, part: Metric, more_tags: tuple[str, ...]) -> float:
    readings = metrics.readings(queued=0, inflight=0)
    return math.fsum(
        value
        for (metric, tags), value in readings.items()
        if metric == part and tags[: 1 + len(more_tags)] == ("m", *more_tags)
    )


def finished(metrics: RequestMetrics, num_tokens: int, *, handed_over: bool) -> None:
    times = SequenceTimes(time.perf_counter() - 100.0)
    times.admitted()
    for position in range(num_tokens):
        if handed_over and position == 1:
            times.taken_over()
        metrics.token(times)
    metrics.ended(times, "length")


def test_those_that_go_sooner_and_later_are_counted_apart() -> None:
    metrics = RequestMetrics("m")
    for priority in (-100, -1, 0, 0, 0, 7):
        times = SequenceTimes(priority=priority)
        times.admitted()
        metrics.token(times)
        metrics.ended(times, "stop")
    for metric in (table.TTFT, table.QUEUE_TIME):
        assert [count(metrics, metric, turn) for turn in ("sooner", "usual", "later")] == [2, 3, 1]


def test_keys_are_counted_apart_and_add_up() -> None:
    metrics = RequestMetrics("m")
    asked: list[tuple[str, int, int, Ending]] = [
        ("alice", 5, 2, "stop"), ("bob", 7, 1, "length"), ("alice", 11, 3, "stop"), ("bob", 0, 0, "refused"),
    ]  # fmt: skip
    for key, prompt_tokens, answer_tokens, reason in asked:
        times = SequenceTimes(key=key)
        times.admitted()
        if prompt_tokens:
            metrics.prompt(prompt_tokens, times)
        for _ in range(answer_tokens):
            metrics.token(times)
        metrics.ended(times, reason)
    readings = metrics.readings(queued=0, inflight=0)
    by_key = {
        (metric, tags): value
        for (metric, tags), value in readings.items()
        if metric in (table.KEY_REQUESTS, table.KEY_PROMPT_TOKENS, table.KEY_GENERATION_TOKENS)
    }
    assert by_key == {
        (table.KEY_PROMPT_TOKENS, ("m", "alice")): 16,
        (table.KEY_PROMPT_TOKENS, ("m", "bob")): 7,
        (table.KEY_GENERATION_TOKENS, ("m", "alice")): 5,
        (table.KEY_GENERATION_TOKENS, ("m", "bob")): 1,
        (table.KEY_REQUESTS, ("m", "alice", "stop")): 2,
        (table.KEY_REQUESTS, ("m", "bob", "length")): 1,
        (table.KEY_REQUESTS, ("m", "bob", "refused")): 1,
    }
    assert (readings[table.PROMPT_TOKENS, ("m",)], readings[table.GENERATION_TOKENS, ("m",)]) == (23, 6)
    assert [readings[table.REQUESTS, ("m", reason)] for reason in ("stop", "length", "refused")] == [2, 1, 1]


STAGES = (table.QUEUE_TIME, table.PREFILL_TIME, table.TRANSFER_TIME, table.DECODE_TIME)


def test_each_token_is_a_first_one_or_comes_after_another() -> None:
    metrics = RequestMetrics("m")
    for num_tokens in (1, 2, 7):
        finished(metrics, num_tokens, handed_over=True)
    assert (count(metrics, table.TTFT), count(metrics, table.ITL)) == (3, 10 - 3)
    assert metrics.readings(queued=0, inflight=0)[table.GENERATION_TOKENS, ("m",)] == 10
    assert total(metrics, table.TTFT) > 300.0


@pytest.mark.parametrize(("handed_over", "transfers"), [(True, 2), (False, 0)])
def test_the_stages_of_what_ends_add_up_to_its_time(handed_over: bool, transfers: int) -> None:
    metrics = RequestMetrics("m")
    for num_tokens in (1, 3, 50):
        finished(metrics, num_tokens, handed_over=handed_over)
    assert [count(metrics, stage) for stage in STAGES] == [3, 3, transfers, 3]
    assert count(metrics, table.E2E) == 3
    stages_s, whole_s = math.fsum(total(metrics, stage) for stage in STAGES), total(metrics, table.E2E)
    assert 300.0 < stages_s <= whole_s < stages_s + 1.0


@pytest.mark.parametrize("reason", ["abort", "timeout", "refused", "error"])
def test_what_does_not_end_by_itself_is_counted_and_has_no_stages(reason: Ending) -> None:
    metrics, times = RequestMetrics("m"), SequenceTimes()
    times.admitted()
    metrics.token(times)
    metrics.ended(times, reason)
    metrics.ended(SequenceTimes(), reason)  # never admitted
    readings = metrics.readings(queued=3, inflight=4)
    assert readings[table.REQUESTS, ("m", reason)] == 2
    assert count(metrics, table.TTFT) == 1
    assert [count(metrics, stage) for stage in (*STAGES, table.E2E)] == [0] * 5
    assert (readings[table.QUEUED, ("m",)], readings[table.INFLIGHT, ("m",)]) == (3, 4)


def test_a_choice_without_a_token_ends_all_the_same() -> None:
    metrics, times = RequestMetrics("m"), SequenceTimes()
    times.admitted()
    metrics.prompt(12, times)
    metrics.ended(times, "length")
    readings = metrics.readings(queued=0, inflight=0)
    assert readings[table.REQUESTS, ("m", "length")] == 1
    assert readings[table.PROMPT_TOKENS, ("m",)] == 12
    assert [count(metrics, metric) for metric in (table.TTFT, *STAGES, table.E2E)] == [0, 0, 0, 0, 0, 1]


def test_what_happens_again_keeps_its_first_time() -> None:
    times = SequenceTimes()
    times.admitted()
    times.taken_over()
    first = (times.admitted_s, times.taken_over_s)
    times.admitted()
    times.taken_over()
    assert (times.admitted_s, times.taken_over_s) == first


def test_histograms_are_there_before_the_first_request() -> None:
    """So that the first increase can be seen in a graph."""
    shown = {series[0] for series in RequestMetrics("m").readings(queued=0, inflight=0)}
    assert shown >= {part for metric in METRICS if metric.kind == "histogram" for part in exported_as(metric)}
