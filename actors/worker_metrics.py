"""From what a worker counts to readings of the metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from actors.engine.counters import EngineCounters
from actors.exchange_counts import ExchangeCounts
from kv.metrics import table
from kv.metrics.readings import failure_readings
from kv.metrics.table import Readings
from migrate.load import Role

if TYPE_CHECKING:
    from actors.load_report import LoadSnapshot


def worker_readings(
    role: Role,
    worker_id: str,
    engine: EngineCounters,
    load: LoadSnapshot,
    num_preemptions: int,
    exchange: ExchangeCounts,
    misses: Mapping[str, int],
    num_repairs: int = 0,
) -> Readings:
    """`misses`: by metric label, without what the store refused, which it counts itself. `num_repairs`: of its
    instance's placement."""
    readings: Readings = {
        (table.RUNNING, (role, worker_id)): load.running_requests,
        (table.WAITING, (role, worker_id)): load.waiting_requests,
        (table.KV_BLOCKS, (role, worker_id)): load.total_blocks,
        (table.KV_USED, (role, worker_id)): load.live_blocks,
        (table.PREEMPTIONS, (role,)): num_preemptions,
        (table.HOSTED_STAGES, (role, worker_id)): engine.hosted_stages,
        (table.HOSTED_S, (role, worker_id)): engine.hosted_s,
        (table.AWAITED_S, (role, worker_id)): engine.awaited_s,
        (table.REPAIRS, (role, worker_id)): num_repairs,
        (table.PREFIX_QUERIES, (role,)): engine.prompt_tokens,
        (table.PREFIX_HITS, (role, "device")): engine.device_hit_tokens,
        (table.LOOKUPS, (role,)): exchange.lookups,
        (table.QUERIED, (role,)): exchange.queried_tokens,
        (table.DECLINED, (role,)): exchange.declined_tokens,
    }
    readings |= {(table.PREFIX_HITS, (role, tier)): count for tier, count in exchange.hit_tokens.items()}
    readings |= {(table.FOUND, (role, tier)): count for tier, count in exchange.found_tokens.items()}
    return readings | failure_readings(misses, table.MISSES, (role,), broken_at="fetch")
