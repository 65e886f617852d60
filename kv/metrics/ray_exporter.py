"""Hands readings to Ray, whose agent on the node shows them to Prometheus.

The agent adds up what the processes of its node report and forgets nothing while it runs: an actor that is started
again counts from zero, and what it counted before stays. So no counter goes back.
"""

from __future__ import annotations

from typing import Final

from ray.util.metrics import Counter, Gauge

from kv.metrics.growth import Growth
from kv.metrics.table import Metric, Readings

EXPORT_PERIOD_S: Final = 1.0
"""For those who export; Ray's own reports go out less often."""


class RayExporter:
    """One process's. Used from one thread."""

    def __init__(self) -> None:
        self._growth = Growth()
        self._counters: dict[Metric, Counter] = {}
        self._gauges: dict[Metric, Gauge] = {}

    def export(self, readings: Readings) -> None:
        """Counters grow to what was read, gauges become that. A counter that is zero yet is not shown."""
        totals = {series: value for series, value in readings.items() if series[0].kind == "counter"}
        for (metric, tags), increment in self._growth.since_last(totals).items():
            if metric not in self._counters:
                self._counters[metric] = Counter(metric.name, metric.help, metric.tags)
            self._counters[metric].inc(increment, dict(zip(metric.tags, tags, strict=True)))
        for (metric, tags), value in readings.items():
            if metric.kind == "gauge":
                if metric not in self._gauges:
                    self._gauges[metric] = Gauge(metric.name, metric.help, metric.tags)
                self._gauges[metric].set(value, dict(zip(metric.tags, tags, strict=True)))
