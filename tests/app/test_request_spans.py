"""Spans of choices, as OpenTelemetry's own SDK collects them."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from app.request_spans import RequestSpans
from app.sequence_times import SequenceTimes
from tests.collected_spans import HOOK, collected


@pytest.fixture
def spans() -> RequestSpans:
    return RequestSpans(HOOK, "m")


def duration_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_stages_follow_each_other_within_the_request(spans: RequestSpans) -> None:
    times = SequenceTimes()
    now_s = times.arrived_s
    times.arrived_s, times.admitted_s, times.first_token_s = now_s - 10.0, now_s - 9.0, now_s - 7.0
    times.taken_over_s, times.last_token_s = now_s - 4.0, now_s - 0.5
    spans.ended("r-0", times, 100, 20, "stop")
    found = collected()
    assert found.keys() == {"request", "queue", "prefill", "transfer", "decode"}
    request = found["request"]
    for name, expected_s in (("queue", 1.0), ("prefill", 2.0), ("transfer", 3.0)):
        assert duration_s(found[name]) == pytest.approx(expected_s, abs=1e-6)
    assert found["queue"].start_time == request.start_time
    assert found["decode"].end_time == request.end_time
    assert found["decode"].start_time == found["transfer"].end_time
    for name in ("queue", "prefill", "transfer", "decode"):
        parent = found[name].parent
        assert parent is not None
        assert parent.span_id == request.context.span_id
    assert dict(request.attributes or {}) == {
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "equipoise.request_id": "r-0",
        "equipoise.finished_reason": "stop",
    }


@pytest.mark.parametrize(
    ("reached", "stages"),
    [
        ((), {"queue"}),
        (("admitted_s",), {"queue", "prefill"}),
        (("admitted_s", "first_token_s"), {"queue", "prefill", "decode"}),
        (("admitted_s", "first_token_s", "taken_over_s"), {"queue", "prefill", "transfer", "decode"}),
    ],
)
def test_what_is_given_up_has_the_stages_that_it_began(
    spans: RequestSpans, reached: tuple[str, ...], stages: set[str]
) -> None:
    times = SequenceTimes()
    for name in reached:
        setattr(times, name, times.arrived_s)
    spans.ended("r-0", times, 5, 0, "abort")
    found = collected()
    assert found.keys() == {"request", *stages}


def test_a_hook_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError):
        RequestSpans("no_such_module:set_up", "m")
    with pytest.raises(AttributeError):
        RequestSpans("json:set_up", "m")
