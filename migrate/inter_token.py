"""The inter-token latency that a placement brings about, for predictions of what a move would do to it."""

from __future__ import annotations

from migrate.fleet import Fleet
from migrate.heads_apart import decode_wait_s
from migrate.worker_share import busy_with_others, rows_of_a_group, step_s


def inter_token_s(fleet: Fleet, instance: str, horizon_s: float) -> float:
    """Seconds from one token of a request to its next, at the batch that `instance` has now. 0 if it decodes nothing.

    Ours. Layers on several workers are run by as many groups of requests in turn. A group's pass takes its turn at each
    worker, and the way to each host and back. A request's next token comes when its group has passed, or when all
    groups have had their turn at the slowest worker, whichever is later. A turn is

    - at home, the step there, and what is run for others before it: the hosted work that arrives meanwhile, but at most
      one piece: a chunk of their prompts through the layers that are here, or less where the engine bounds it;
    - at a host, the layers there, and the rest of the host's own step that is under way, taken to be a whole one, as
      often as the host is busy with other things.

    Heads elsewhere are waited for in each layer where they, and their trip, take longer than those that stayed.
    """
    figures = fleet.figures[instance]
    if figures.running == 0:
        return 0.0
    rows = rows_of_a_group(fleet, instance)
    turns = _layers_s(fleet, instance, rows, horizon_s)
    at_home_s = turns.pop(instance, 0.0) + fleet.model.times.head_s(rows)
    trips_s = 0.0
    for host in turns:
        trips_s += fleet.model.hidden_round_trip_s(rows, instance, host)
        turns[host] += busy_with_others(fleet, instance, host, horizon_s) * step_s(fleet, host, host)
    turns[instance] = at_home_s + _wait_at_home_s(fleet, instance, at_home_s, horizon_s)
    groups = figures.running / rows
    return max(sum(turns.values()) + trips_s, groups * max(turns.values()))


def undisturbed_s(fleet: Fleet, instance: str) -> float:
    """What `inter_token_s` is with all of the instance at home and nobody else there."""
    running = fleet.figures[instance].running
    times = fleet.model.times
    return fleet.model.sizes.num_layers * times.layer_s(running) + times.head_s(running) if running > 0 else 0.0


def _layers_s(fleet: Fleet, instance: str, rows: float, horizon_s: float) -> dict[str, float]:
    """Seconds of one group's pass at each worker with layers of `instance`, waiting for heads elsewhere included."""
    times, parts = fleet.model.times, fleet.parts[instance]
    attention_s = times.decode_attention_share * times.layer_s(rows)
    lanes, num_heads = fleet.placements[instance].lane_workers, fleet.model.sizes.num_kv_heads
    seconds = {}
    for owner in sorted(worker for worker, part in parts.items() if part.layers):
        here = sum(worker == owner for layer in parts[owner].layers for worker in lanes[layer])
        seconds[owner] = len(parts[owner].layers) * (times.layer_s(rows) - attention_s) + attention_s * here / num_heads
    seconds[instance] = seconds.get(instance, 0.0) + decode_wait_s(fleet, instance, rows, horizon_s)
    return seconds


def _wait_at_home_s(fleet: Fleet, instance: str, own_s: float, horizon_s: float) -> float:
    others = (other for other in fleet.figures if other != instance)
    longest_s = max((step_s(fleet, other, instance) for other in others), default=0.0)
    if fleet.model.hosted_slice_s is not None:
        longest_s = min(longest_s, fleet.model.hosted_slice_s)
    hosted = busy_with_others(fleet, instance, instance, horizon_s)
    return longest_s if hosted >= 1 else min(longest_s, own_s * hosted / (1 - hosted))
