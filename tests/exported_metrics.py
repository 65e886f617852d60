"""What Ray's agent on the tests' node shows to Prometheus."""

from __future__ import annotations

import contextlib
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kv.metrics.histogram import exported_as
from kv.metrics.table import METRICS, Metric, Readings
from tests.store_cell import eventually, get

_LOOK_EVERY_S = 0.2
"""Ray's processes report every second (tests/conftest.py)."""


def process_of(actor: Any) -> str:
    """Ray's id of the process that an actor runs in now."""
    return str(get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_worker_id())))


def all_samples() -> Iterator[Sample]:
    """All that the agent shows, Ray's own metrics included."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


def samples() -> Iterator[tuple[Metric, Sample]]:
    """Of our metrics, by what they are exported as."""
    ours = {f"ray_{part.name}": part for metric in METRICS for part in exported_as(metric)}
    for sample in all_samples():
        if sample.name in ours:
            yield ours[sample.name], sample


def exported(of: Collection[str]) -> Readings:
    """Our metrics, as far as these processes have reported them, summed over them."""
    found: Readings = defaultdict(float)
    for metric, sample in samples():
        if sample.labels["WorkerId"] in of:
            found[metric, tuple(sample.labels[tag] for tag in metric.tags)] += sample.value
    return dict(found)


def assert_exported(expected: Mapping[Any, float], of: Collection[str]) -> None:
    """Soon these processes' counters, and those of the gauges that are expected, are shown just so. Counters that are
    zero are not shown."""
    wanted = {series: value for series, value in expected.items() if value or series[0].kind == "gauge"}
    shown: Readings = {}

    def is_shown() -> bool:
        nonlocal shown
        shown = {
            series: value for series, value in exported(of).items() if series[0].kind == "counter" or series in wanted
        }
        return shown == wanted

    with contextlib.suppress(AssertionError):
        eventually(is_shown, _LOOK_EVERY_S)
    assert shown == wanted
