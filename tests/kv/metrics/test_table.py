"""The table of metrics: its names, its page, and that each metric is told by somebody."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from actors.engine.counters import EngineCounters
from actors.exchange_counts import ExchangeCounts
from actors.load_report import LoadSnapshot
from actors.worker_metrics import worker_readings
from app.request_metrics import RequestMetrics
from app.sequence_times import SequenceTimes
from kv.directory import Directory
from kv.directory_counters import DirectoryCounters
from kv.fetch_choice import FetchRun
from kv.metrics import table
from kv.metrics.histogram import exported_as
from kv.metrics.readings import directory_readings, store_readings
from kv.metrics.table import METRICS, Readings
from kv.store_stats import DiskStats, StoreStats
from migrate.controller import Controller, Observation
from migrate.controller_metrics import controller_readings
from migrate.controller_settings import ControllerSettings
from migrate.move_history import Outcome
from migrate.placement import Placement
from tests.migrate.fleets import fleet, model
from tests.migrate.fleets import worker as workload

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def made(kind: Any, **given: Any) -> Any:
    """A record whose numbers are all different."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: given.get(name, 1000 + place) for place, name in enumerate(names)})


STORE: StoreStats = made(
    StoreStats,
    refusals={"capacity": 3, "part_checksum": 4, "disk_unavailable": 7},
    disk=made(DiskStats, refusals={"disk_full": 5, "part_truncated": 6}),
)


def worker() -> Readings:
    counts = ExchangeCounts(declined_tokens=9)
    runs = [FetchRun(32, 100, "dram"), FetchRun(16, 100, "disk"), FetchRun(64, 100, "disk")]
    counts.looked_up(200, runs)
    counts.looked_up(16, [])
    counts.fetched(runs, 50)
    engine = EngineCounters(prompt_tokens=500, cached_prompt_tokens=80, device_hit_tokens=30, awaited_s=1.5)
    engine.count_hosted(0.25)
    engine.count_hosted(0.5)
    load = LoadSnapshot(total_blocks=60, live_blocks=50, running_requests=4, waiting_requests=6)
    return worker_readings("prefill", "w1", engine, load, 8, counts, Counter(timeout=2, part_magic=1), 2)


def requests() -> Readings:
    metrics = RequestMetrics("m")
    times = SequenceTimes()
    metrics.prompt(3, times)
    metrics.token(times)
    metrics.ended(times, "abort")
    return metrics.readings(queued=1, inflight=2)


def moves() -> Readings:
    home = Placement.at_home("a", 2, 2)
    busy, idle = workload("a", prefill_tokens_per_s=200), workload("b")
    cost, away = model(layers=2, heads=2), home.with_layers_moved(1, 1, "b")
    controller = Controller(ControllerSettings())
    controller.history.counts["layers", Outcome.DONE] = 1
    controller.history.moved_bytes["layers", "kv"] = 7
    return controller_readings(controller, Observation(fleet(cost, busy, idle, placed=(away,)), 0.0))


def all_readings() -> Readings:
    return requests() | worker() | store_readings("n1", STORE) | directory_readings(Directory(), 0) | moves()


def test_names_say_what_they_are() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"equipoise(_[a-z0-9]+)+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.help.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.bounds)
        assert list(metric.bounds) == sorted(set(metric.bounds))


def test_the_page_has_the_table() -> None:
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `equipoise_")
    ]
    assert rows == [(f"`{each.name}`", each.kind, ", ".join(each.tags), each.help) for each in METRICS]


def test_each_metric_is_told_with_a_value_for_each_tag() -> None:
    assert {metric for metric, _ in all_readings()} == {part for each in METRICS for part in exported_as(each)}
    assert all(len(metric.tags) == len(values) for metric, values in all_readings())


def test_a_worker_tells_its_load_and_hits_by_tier() -> None:
    assert worker() == {
        (table.RUNNING, ("prefill", "w1")): 4,
        (table.WAITING, ("prefill", "w1")): 6,
        (table.KV_BLOCKS, ("prefill", "w1")): 60,
        (table.KV_USED, ("prefill", "w1")): 50,
        (table.PREEMPTIONS, ("prefill",)): 8,
        (table.HOSTED_STAGES, ("prefill", "w1")): 2,
        (table.HOSTED_S, ("prefill", "w1")): 0.75,
        (table.AWAITED_S, ("prefill", "w1")): 1.5,
        (table.REPAIRS, ("prefill", "w1")): 2,
        (table.PREFIX_QUERIES, ("prefill",)): 500,
        (table.PREFIX_HITS, ("prefill", "device")): 30,
        (table.PREFIX_HITS, ("prefill", "dram")): 32,
        (table.PREFIX_HITS, ("prefill", "disk")): 16 + 2,
        (table.LOOKUPS, ("prefill",)): 2,
        (table.QUERIED, ("prefill",)): 216,
        (table.FOUND, ("prefill", "dram")): 32,
        (table.FOUND, ("prefill", "disk")): 80,
        (table.DECLINED, ("prefill",)): 9,
        (table.MISSES, ("prefill", "timeout")): 2,
        (table.BROKEN_PARTS, ("fetch", "magic")): 1,
    }


def test_a_store_tells_of_both_tiers() -> None:
    disk = STORE.disk
    assert disk is not None
    readings = store_readings("n1", STORE)
    for tier, part in (("dram", STORE), ("disk", disk)):
        assert readings[table.LIMIT, ("n1", tier)] == part.limit_bytes
        assert readings[table.USED, ("n1", tier)] == part.used_bytes
        assert readings[table.EXTENTS, ("n1", tier)] == part.num_extents
    moved = {tags[1]: value for (metric, tags), value in readings.items() if metric is table.MOVED}
    assert moved == {
        "dram_write": STORE.stored_bytes,
        "dram_read": STORE.given_bytes,
        "disk_write": disk.written_bytes,
        "disk_read": disk.read_bytes,
        "promote": disk.promoted_bytes,
        "demote": disk.demoted_bytes,
    }
    refusals = {tags: value for (metric, tags), value in readings.items() if metric is table.REFUSALS}
    assert refusals == {
        ("n1", "dram", "capacity"): 3,
        ("n1", "disk", "disk_full"): 5,
        ("n1", "disk", "disk_unavailable"): 7,
    }
    broken = {tags: value for (metric, tags), value in readings.items() if metric is table.BROKEN_PARTS}
    assert broken == {("pull", "checksum"): 4, ("disk", "truncated"): 6}


def test_a_store_without_a_disk_tells_of_dram_alone() -> None:
    readings = store_readings("n1", made(StoreStats, refusals={}, disk=None))
    assert {tags[1] for metric, tags in readings if "tier" in metric.tags} == {"dram"}


def test_the_directory_tells_why_copies_went() -> None:
    directory = Directory()
    directory.counters = made(
        DirectoryCounters,
        evicted={"dram": 1, "disk": 2},
        trimmed={"dram": 3, "disk": 4},
        expired={"dram": 5, "disk": 6},
        lost={"dram": 7, "disk": 8},
    )
    readings = directory_readings(directory, 2)
    assert {tags[0] for _, tags in readings} == {"2"}
    went = {tags[1:]: value for (metric, tags), value in readings.items() if metric is table.EVICTIONS}
    assert went == {
        ("dram", "capacity"): 1,
        ("disk", "capacity"): 2,
        ("dram", "limit"): 3,
        ("disk", "limit"): 4,
        ("dram", "ttl"): 5,
        ("disk", "ttl"): 6,
        ("dram", "lost"): 7,
        ("disk", "lost"): 8,
    }
