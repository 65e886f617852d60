"""Histograms that are counted where things happen, and exported as Prometheus knows them. Pure.

Ray's own would do for little traffic. Its agent takes a node's observations one by one (about 10 us each, where
counting one here takes 0.3 us), and has only the middle of a bucket for each, so that sums are guesses
(https://github.com/ray-project/ray/issues/54538).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from kv.metrics.table import Metric, Readings, Series


class Histogram:
    """One series of a metric of that kind. Used from one thread."""

    def __init__(self, metric: Metric, tags: tuple[str, ...]) -> None:
        """`tags`: the values of the metric's tags, in their order."""
        buckets, sum_, count = exported_as(metric)
        bounds = [*map(str, metric.bounds), "+Inf"]
        self._bounds = metric.bounds
        self._counts = [0] * len(bounds)
        self._sum = 0.0
        self._buckets: list[Series] = [(buckets, (*tags, bound)) for bound in bounds]
        self._sum_series: Series = (sum_, tags)
        self._count_series: Series = (count, tags)

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def readings(self) -> Readings:
        """Each bucket holds all that is at most its bound, as Prometheus has it."""
        totals = list(accumulate(self._counts))
        readings: Readings = dict(zip(self._buckets, totals, strict=True))
        return readings | {self._sum_series: self._sum, self._count_series: totals[-1]}


def exported_as(metric: Metric) -> tuple[Metric, ...]:
    """The metrics that this one is to Ray: itself, or a histogram's buckets, sum and count.

    Those are gauges that are set to totals. As counters of Ray's they would be called `..._bucket_total`, which no
    dashboard knows, and Prometheus' functions ask for a counter's values and not for its type.
    """
    if metric.kind != "histogram":
        return (metric,)
    parts = (("bucket", (*metric.tags, "le")), ("sum", metric.tags), ("count", metric.tags))
    return tuple(Metric(f"{metric.name}_{part}", "gauge", tags, metric.help) for part, tags in parts)
