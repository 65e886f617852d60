"""From what the directory and a node's store count to readings of the metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from kv.directory import Directory
from kv.metrics import table
from kv.metrics.table import Metric, Readings
from kv.store_stats import StoreStats
from kv.tiers import TIERS, Tier

_BROKEN = "part_"
"""How `kv.ray_failures.failure_label` begins the reasons of a `PartError`."""
_NO_DISK = "disk_unavailable"


def directory_readings(directory: Directory, shard: int) -> Readings:
    """Of one shard. Expired leases count as held until they are swept."""
    counters, number = directory.counters, str(shard)
    readings: Readings = {
        (table.BLOCKS, (number,)): directory.num_blocks,
        (table.LEASES, (number,)): directory.num_leases,
        (table.LEASES_GRANTED, (number,)): counters.leases_granted,
        (table.LEASES_EXPIRED, (number,)): counters.leases_expired,
        (table.PUTS, (number, "committed")): counters.puts_committed,
        (table.PUTS, (number, "aborted")): counters.puts_aborted,
        (table.PUTS, (number, "expired")): counters.puts_expired,
        (table.PUTS, (number, "refused")): counters.puts_refused,
        (table.EVICTIONS_REFUSED, (number,)): counters.evictions_refused,
        (table.BROKEN_EXTENTS, (number,)): counters.extents_broken,
        (table.ADOPTED, (number,)): counters.extents_adopted,
    }
    causes: dict[str, Mapping[Tier, int]] = {
        "capacity": counters.evicted,
        "limit": counters.trimmed,
        "ttl": counters.expired,
        "lost": counters.lost,
    }
    for cause, by_tier in causes.items():
        readings.update({(table.EVICTIONS, (number, tier, cause)): count for tier, count in by_tier.items()})
    return readings


def store_readings(store_id: str, stats: StoreStats) -> Readings:
    """Of both tiers, as far as there is a disk."""
    readings: Readings = {
        (table.LIMIT, (store_id, "dram")): stats.limit_bytes,
        (table.USED, (store_id, "dram")): stats.used_bytes,
        (table.EXTENTS, (store_id, "dram")): stats.num_extents,
        (table.TAILS, (store_id,)): stats.num_tails,
        (table.MOVED, (store_id, "dram_write")): stats.stored_bytes,
        (table.MOVED, (store_id, "dram_read")): stats.given_bytes,
        (table.PULLS, (store_id,)): stats.num_pulls,
        (table.STORED, (store_id,)): stats.num_stored_blocks,
        (table.EXPIRED_TAILS, (store_id,)): stats.num_expired_tails,
    }
    for tier in TIERS:
        # A disk tier that cannot be opened is counted by the store, which goes on without.
        refusals = {label: count for label, count in stats.refusals.items() if (tier == "disk") == (label == _NO_DISK)}
        readings |= failure_readings(refusals, table.REFUSALS, (store_id, tier), broken_at="pull")
    disk = stats.disk
    if disk is not None:
        readings |= {
            (table.LIMIT, (store_id, "disk")): disk.limit_bytes,
            (table.USED, (store_id, "disk")): disk.used_bytes,
            (table.EXTENTS, (store_id, "disk")): disk.num_extents,
            (table.DISK_QUEUE, (store_id,)): disk.num_queued_extents,
            (table.MOVED, (store_id, "disk_write")): disk.written_bytes,
            (table.MOVED, (store_id, "disk_read")): disk.read_bytes,
            (table.MOVED, (store_id, "promote")): disk.promoted_bytes,
            (table.MOVED, (store_id, "demote")): disk.demoted_bytes,
        }
        readings |= failure_readings(disk.refusals, table.REFUSALS, (store_id, "disk"), broken_at="disk")
    return readings


def failure_readings(counts: Mapping[str, int], metric: Metric, tags: tuple[str, ...], *, broken_at: str) -> Readings:
    """Counts by metric label, as readings of `metric` with the label as its last tag; broken parts as their own.

    Args:
        tags: values of the metric's tags before the last one.
        broken_at: where they were noticed.
    """
    return {
        (table.BROKEN_PARTS, (broken_at, label.removeprefix(_BROKEN)))
        if label.startswith(_BROKEN)
        else (metric, (*tags, label)): count
        for label, count in counts.items()
    }
