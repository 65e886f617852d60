"""OpenTelemetry spans of requests: one a choice, with one in it for each stage that it went through.

They are made when a choice has ended, from the times that its metrics are made from. They carry lengths and ids, never
text. Without a hook that sets OpenTelemetry up there are none, and it need not be installed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from app.sequence_times import SequenceTimes

_NS = 1_000_000_000


class RequestSpans:
    """Of one ingress replica.

    Args:
        hook: `module:function`; called once, without arguments, it sets OpenTelemetry's tracer provider.
        model: the name that it is served by.

    Raises:
        ImportError, AttributeError: there is no such hook, or OpenTelemetry's API is not installed.
    """

    def __init__(self, hook: str, model: str) -> None:
        from opentelemetry import trace

        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()
        self._set_in = trace.set_span_in_context
        self._tracer = trace.get_tracer("equipoise")
        self._model = model

    def ended(self, request_id: str, times: SequenceTimes, prompt_tokens: int, answer_tokens: int, reason: str) -> None:
        """A choice has ended now, for the reason that its metrics have."""
        ended_s = time.perf_counter()
        to_epoch_s = time.time() - ended_s

        def ns(at_s: float) -> int:
            return int((at_s + to_epoch_s) * _NS)

        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": answer_tokens,
            "equipoise.request_id": request_id,
            "equipoise.finished_reason": reason,
        }
        span = self._tracer.start_span("request", start_time=ns(times.arrived_s), attributes=attributes)
        context = self._set_in(span)
        for name, begin_s, end_s in stages_of(times, ended_s):
            stage = self._tracer.start_span(name, context, start_time=ns(begin_s))
            stage.end(ns(end_s))
        span.end(ns(ended_s))


def stages_of(times: SequenceTimes, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Each stage that was begun, with its begin and end; the one in which the choice ended ends with it."""
    begins = [
        ("queue", times.arrived_s),
        ("prefill", times.admitted_s),
        ("transfer", times.first_token_s if times.taken_over_s is not None else None),
        ("decode", times.taken_over_s if times.taken_over_s is not None else times.first_token_s),
    ]
    begun = [(name, begin_s) for name, begin_s in begins if begin_s is not None]
    ends = [begin_s for _, begin_s in begun[1:]] + [ended_s]
    for (name, begin_s), end_s in zip(begun, ends, strict=True):
        yield name, begin_s, end_s
