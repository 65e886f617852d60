"""Spans of this process, as OpenTelemetry's own SDK collects them."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

HOOK = f"{__name__}:set_up"
_COLLECTED = InMemorySpanExporter()


def set_up() -> None:
    """For `ingress.tracing`. A process has one provider for good; what was collected before is forgotten."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_COLLECTED))
        trace.set_tracer_provider(provider)
    _COLLECTED.clear()


def collected() -> dict[str, ReadableSpan]:
    """By name: of one choice."""
    spans = _COLLECTED.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}
