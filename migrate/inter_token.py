"""The inter-token latency that a placement brings about, for predictions of what a move would do to it."""

from __future__ import annotations

from collections import Counter

from migrate.fleet import Fleet
from migrate.offered_work import offered


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
        turns[host] += busy_with_others(fleet, instance, host, horizon_s) * _step_s(fleet, host, host)
    turns[instance] = at_home_s + _wait_at_home_s(fleet, instance, at_home_s, horizon_s)
    groups = figures.running / rows
    return max(sum(turns.values()) + trips_s, groups * max(turns.values()))


def undisturbed_s(fleet: Fleet, instance: str) -> float:
    """What `inter_token_s` is with all of the instance at home and nobody else there."""
    running = fleet.figures[instance].running
    times = fleet.model.times
    return fleet.model.sizes.num_layers * times.layer_s(running) + times.head_s(running) if running > 0 else 0.0


def rows_of_a_group(fleet: Fleet, instance: str) -> float:
    """Mean rows of a decode step of `instance`: its requests, over the groups that take turns."""
    running = fleet.figures[instance].running
    return running / max(1.0, min(fleet.stage_workers(instance), running))


def busy_with_others(fleet: Fleet, instance: str, worker: str, horizon_s: float) -> float:
    """Share of the time, 0 to 1, in which `worker` is busy with work that is not of `instance`.

    Unlike utilisation, at the batches that there are: a decode loop with one request is always busy.
    """
    others = (home for home in fleet.figures if home != instance)
    return min(1.0, sum(_share_of(fleet, home, worker, horizon_s) for home in others))


def turn_s(fleet: Fleet, worker: str, horizon_s: float) -> float:
    """Seconds that a call in a worker's engine waits (ours): for a whole step, of its own or of what it hosts, as often
    as it is at one. Whoever asks has just had an answer to something else, when a step had just begun."""
    shares = {home: _share_of(fleet, home, worker, horizon_s) for home in fleet.figures}
    all_of_it = max(1.0, sum(shares.values()))
    return sum(share / all_of_it * _step_s(fleet, home, worker) for home, share in shares.items())


def _layers_s(fleet: Fleet, instance: str, rows: float, horizon_s: float) -> dict[str, float]:
    """Seconds of one group's pass at each worker with layers of `instance`."""
    placement = fleet.placements[instance]
    times = fleet.model.times
    attention_s = times.decode_attention_share * times.layer_s(rows)
    seconds: dict[str, float] = dict.fromkeys(sorted(set(placement.layer_workers)), 0.0)
    alike = Counter(zip(placement.layer_workers, placement.lane_workers, strict=True))
    for (owner, lanes), count in alike.items():
        slowest = 0.0
        for worker, heads in Counter(lanes).items():
            part_s = attention_s * heads / len(lanes)
            if worker != owner:
                # A service thread attends to hosted heads; a busy host's own thread has half of the core.
                if worker in fleet.figures:
                    part_s *= 1 + busy_with_others(fleet, instance, worker, horizon_s)
                part_s += fleet.model.head_round_trip_s(rows, heads, owner, worker)
            slowest = max(slowest, part_s)
        seconds[owner] += count * (times.layer_s(rows) - attention_s + slowest)
    return seconds


def _share_of(fleet: Fleet, instance: str, worker: str, horizon_s: float) -> float:
    """Share of the time in which `worker` is busy with work of `instance`; above 1 where it cannot keep up."""
    figures, times = fleet.figures[instance], fleet.model.times
    prefill = _prefill_tokens_per_s(fleet, instance, horizon_s)
    share = prefill * times.prefill_token_s * fleet.part(instance, worker).prefill_layers
    if figures.running > 0:
        steps_per_s = figures.decode_tokens_per_s / rows_of_a_group(fleet, instance)
        share += steps_per_s * _decode_step_s(fleet, instance, worker)
    return share


def _prefill_tokens_per_s(fleet: Fleet, instance: str, horizon_s: float) -> float:
    """Prompt tokens of `instance` that are computed in a second: those that arrive, or as many as its busiest worker
    gets done, when it cannot do more or as long as prompts wait. A backlog is not worked off at leisure."""
    figures = fleet.figures[instance]
    each_s = fleet.model.times.prefill_token_s * max(part.prefill_layers for part in fleet.parts[instance].values())
    tokens_per_s, _ = offered(fleet, instance, horizon_s)
    if each_s <= 0 or tokens_per_s <= 0:
        return tokens_per_s
    waits = figures.pending_prefill_tokens > figures.prefill_step_tokens
    return 1 / each_s if waits else min(tokens_per_s, 1 / each_s)


def _decode_step_s(fleet: Fleet, instance: str, worker: str) -> float:
    """Seconds that one decode step of `instance` keeps `worker` busy."""
    rows = rows_of_a_group(fleet, instance)
    seconds = fleet.model.times.layer_s(rows) * fleet.part(instance, worker).decode_layers
    return seconds + fleet.model.times.head_s(rows) if worker == instance else seconds


def _step_s(fleet: Fleet, instance: str, worker: str) -> float:
    """Seconds that a whole step of `instance`, a chunk of prompts and its decodes, keeps `worker` busy."""
    figures = fleet.figures.get(instance)
    if figures is None:
        return 0.0
    prefill_layers = fleet.part(instance, worker).prefill_layers
    chunk_s = figures.prefill_step_tokens * fleet.model.times.prefill_token_s * prefill_layers
    return chunk_s + (_decode_step_s(fleet, instance, worker) if figures.running > 0 else 0.0)


def _wait_at_home_s(fleet: Fleet, instance: str, step_s: float, horizon_s: float) -> float:
    others = (other for other in fleet.figures if other != instance)
    longest_s = max((_step_s(fleet, other, instance) for other in others), default=0.0)
    if fleet.model.hosted_slice_s is not None:
        longest_s = min(longest_s, fleet.model.hosted_slice_s)
    hosted = busy_with_others(fleet, instance, instance, horizon_s)
    return longest_s if hosted >= 1 else min(longest_s, step_s * hosted / (1 - hosted))
