"""What Ray shows of a real store and directory is what these count, also over a crash."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, cast

import pytest

from kv.disk.settings import DiskSettings
from kv.metrics import table
from kv.metrics.readings import store_readings
from kv.metrics.table import Readings
from kv.node_store import NodeStore
from kv.part_range import MIN_PART_LIMIT_BYTES
from kv.tiers import TIERS
from tests.exported_metrics import assert_exported, process_of
from tests.store_cell import MIB, Setup, chain, crash, eventually, fetch, get, pull, stats_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def directory_counters(stats: dict[str, Any]) -> Readings:
    causes = {"evicted": "capacity", "trimmed": "limit", "expired": "ttl", "lost": "lost"}
    return {
        **{(table.PUTS, ("0", how)): stats[f"puts_{how}"] for how in ("committed", "aborted", "expired", "refused")},
        **{(table.EVICTIONS, ("0", tier, why)): stats[name][tier] for name, why in causes.items() for tier in TIERS},
        (table.LEASES_GRANTED, ("0",)): stats["leases_granted"],
        (table.LEASES_EXPIRED, ("0",)): stats["leases_expired"],
        (table.EVICTIONS_REFUSED, ("0",)): stats["evictions_refused"],
        (table.BROKEN_EXTENTS, ("0",)): stats["extents_broken"],
        (table.ADOPTED, ("0",)): stats["extents_adopted"],
    }


def counters(readings: Readings) -> Readings:
    return {series: value for series, value in readings.items() if series[0].kind == "counter"}


def added(first: Readings, second: Readings) -> Readings:
    return {series: first.get(series, 0) + second.get(series, 0) for series in first.keys() | second.keys()}


def test_what_ray_shows_is_what_is_counted(setup: Setup, worker: Any, tmp_path: Path) -> None:
    name = f"metered-{uuid.uuid4().hex}"
    store = setup.start(
        cast(Any, NodeStore).options(max_restarts=-1),
        (name, [setup.directory], 2 * MIB),
        disk=DiskSettings(str(tmp_path), 64 * MIB),
        max_part_bytes=MIN_PART_LIMIT_BYTES,
    )
    a, b, c = (chain(letter, 12) for letter in "abc")
    for keys in (a, b):
        assert pull(store, worker, keys).num_stored_blocks == 12
        assert get(store.flush.remote(30.0))
    assert pull(store, setup.worker("flips a bit of the last part"), c).refusals == ("part_checksum",)
    assert pull(store, worker, c).num_stored_blocks == 12
    assert get(store.flush.remote(30.0))
    found = setup.lookup(a)
    assert [piece.tier for piece in found.slices] == ["disk"]
    assert fetch(setup, {name: store}, a, found) == (12, [])
    assert fetch(setup, {name: store}, c, setup.lookup(c)) == (12, [])
    eventually(lambda: setup.directory_stats()["num_leases"] == 0)
    get(store.set_limits.remote(MIB // 2, None))

    stats, by_directory = stats_of(store), setup.directory_stats()
    before = store_readings(name, stats)
    assert stats.disk is not None
    assert min(stats.stored_bytes, stats.given_bytes, stats.disk.written_bytes, stats.disk.promoted_bytes) > 0
    assert by_directory["evicted"]["dram"] > 0
    assert by_directory["trimmed"]["dram"] > 0
    first, directory_process = process_of(store), process_of(setup.directory)
    assert_exported(before, of=[first])
    assert_exported(
        {
            **directory_counters(by_directory),
            (table.BLOCKS, ("0",)): by_directory["num_blocks"],
            (table.LEASES, ("0",)): 0,
        },
        of=[directory_process],
    )

    # What a new process counts comes on top of it.
    crash(store)
    eventually(lambda: (disk := stats_of(store).disk) is not None and disk.num_found_extents == 3)
    assert pull(store, worker, chain("d", 6)).num_stored_blocks == 6
    assert get(store.flush.remote(30.0))
    assert_exported(
        added(counters(before), counters(store_readings(name, stats_of(store)))), of=[first, process_of(store)]
    )
    by_directory = setup.directory_stats()
    assert by_directory["lost"]["disk"] == 3
    assert_exported(directory_counters(by_directory), of=[directory_process])
