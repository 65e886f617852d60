"""What a step waits for KV heads that are not with their layer (ours).

In each such layer q, k and v go there and the attention output comes back, while the heads that stayed are attended
with at home. Home does nothing else meanwhile: where the others and their trip take longer, it waits.
"""

from __future__ import annotations

from collections import Counter

from migrate.fleet import Fleet
from migrate.worker_share import busy_with_others


def decode_wait_s(fleet: Fleet, instance: str, rows: float, horizon_s: float) -> float:
    """Seconds that a decode step of `rows` rows waits, over all layers at home."""
    times = fleet.model.times
    return _wait_s(fleet, instance, rows, times.decode_attention_share * times.layer_s(rows), horizon_s)


def prefill_wait_s(fleet: Fleet, instance: str, tokens: float, horizon_s: float) -> float:
    """Seconds that a chunk of `tokens` prompt tokens waits, over all layers at home."""
    times = fleet.model.times
    attention_s = times.prefill_attention_share * times.prefill_token_s * tokens
    return _wait_s(fleet, instance, tokens, attention_s, horizon_s)


def _wait_s(fleet: Fleet, instance: str, rows: float, attention_s: float, horizon_s: float) -> float:
    """`attention_s`: what all heads of a layer take."""
    placement, model = fleet.placements[instance], fleet.model
    seconds = 0.0
    for (owner, lanes), count in Counter(zip(placement.layer_workers, placement.lane_workers, strict=True)).items():
        if owner != instance:
            continue  # whoever runs layers of others has all their heads
        heads_of = Counter(lanes)
        local_s = slowest_s = attention_s * heads_of.pop(owner, 0) / len(lanes)
        for worker, heads in heads_of.items():
            part_s = attention_s * heads / len(lanes)
            # A service thread attends to hosted heads; a busy host's own thread has half of the core.
            if worker in fleet.figures:
                part_s *= 1 + busy_with_others(fleet, instance, worker, horizon_s)
            slowest_s = max(slowest_s, part_s + model.head_round_trip_s(rows, heads, owner, worker))
        seconds += count * (slowest_s - local_s)
    return seconds
