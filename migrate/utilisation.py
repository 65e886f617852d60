"""How loaded a worker is: offered compute and memory of live requests, in one figure U."""

from __future__ import annotations

import math
from dataclasses import dataclass

from migrate.fleet import Fleet
from migrate.heads_apart import decode_wait_s, prefill_wait_s
from migrate.move_settings import MoveSettings
from migrate.offered_work import offered, reached_rows


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What U of a worker is made of. Neither part is bounded by 1: a worker can be offered more than it can do."""

    compute: float
    """u_c, seconds of work offered in a second."""
    memory: float
    """u_m, bytes of live requests over bytes for KV."""
    weighted: float
    """U = compute_weight * u_c + memory_weight * u_m."""

    @property
    def scarcest(self) -> float:
        """The larger of the two: how short the worker is of what it has least of."""
        return max(self.compute, self.memory)


def utilisation(fleet: Fleet, worker: str, settings: MoveSettings) -> Utilisation:
    """U of `worker`, which `fleet` knows. Without traffic it is 0.

    Work is counted where its weights, or for attention its KV heads, lie. Decodes are counted at what they cost in the
    batch that they could share: a loop with one request is always busy, and yet has room.
    """
    compute = compute_load(fleet, worker, settings)
    memory = memory_load(fleet, worker)
    return Utilisation(compute, memory, settings.compute_weight * compute + settings.memory_weight * memory)


def compute_load(fleet: Fleet, worker: str, settings: MoveSettings) -> float:
    """u_c: work offered to `worker`, its own and hosted, and waiting for heads elsewhere, in seconds per second (ours).
    See `offered` and `reached_rows`."""
    times = fleet.model.times
    load = 0.0
    for figures in fleet.figures.values():
        part = fleet.part(figures.worker, worker)
        prefill, decode = offered(fleet, figures.worker, settings.horizon_s)
        load += prefill * times.prefill_token_s * part.prefill_layers
        if decode > 0:
            groups, rows = fleet.stage_workers(figures.worker), reached_rows(fleet, figures.worker, settings)
            load += decode * times.decode_token_s(rows, groups) * part.decode_layers
            if figures.worker == worker:
                load += decode * times.head_token_s(rows, groups)
                each = rows / min(groups, rows)
                load += decode / each * decode_wait_s(fleet, worker, each, settings.horizon_s)
        if figures.worker == worker and prefill > 0:
            chunk = max(1.0, figures.prefill_step_tokens)
            load += prefill / chunk * prefill_wait_s(fleet, worker, chunk, settings.horizon_s)
    return load


def memory_load(fleet: Fleet, worker: str) -> float:
    """u_m: bytes that live requests hold on `worker`, its own and others', over its bytes for KV (ours).

    With everything at home that is live blocks over blocks. What is cached and held by nobody is room, not load.
    """
    # One page at least, so that a worker whose memory the weights fill has a finite load.
    return fleet.live_bytes(worker) / max(fleet.kv_bytes(worker), fleet.model.sizes.page_bytes)


def offered_per_s(done: float, pending_before: float, pending_after: float, period_s: float) -> float:
    """Tokens that arrived in a second, from what was done in a period and by how much the backlog grew meanwhile.

    Counting what was done alone would call a worker with a growing queue no more than full.

    Raises:
        ValueError: a period that is not finite and above 0.
    """
    if not (math.isfinite(period_s) and period_s > 0):
        raise ValueError(f"period_s is {period_s}; it must be finite and above 0")
    return max(0.0, done + pending_after - pending_before) / period_s
