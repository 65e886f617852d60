"""Histograms against counting by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv.metrics.histogram import Histogram, exported_as
from kv.metrics.table import LOOKUPS, Metric

METRIC = Metric("waits_seconds", "histogram", ("model",), "Waits.", (0.5, 1.0, 4.0))
BUCKETS, SUM, COUNT = exported_as(METRIC)


@given(st.lists(st.floats(0, 10) | st.sampled_from(METRIC.bounds)))
def test_each_bucket_has_all_that_is_at_most_its_bound(values: list[float]) -> None:
    histogram = Histogram(METRIC, ("m",))
    for value in values:
        histogram.observe(value)
    assert histogram.readings() == {
        **{(BUCKETS, ("m", str(bound))): sum(value <= bound for value in values) for bound in METRIC.bounds},
        (BUCKETS, ("m", "+Inf")): len(values),
        (SUM, ("m",)): sum(values),
        (COUNT, ("m",)): len(values),
    }


def test_parts_have_the_names_that_prometheus_knows() -> None:
    assert [part.name for part in exported_as(METRIC)] == [f"waits_seconds_{end}" for end in ("bucket", "sum", "count")]
    assert exported_as(LOOKUPS) == (LOOKUPS,)
