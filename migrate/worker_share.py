"""How much of its time a worker is busy with work of one instance, at the batches that there are now (ours).

Unlike utilisation, which asks what work would cost in the batch that it could share: here a decode loop with one
request is always busy. It is what others have to wait for.
"""

from __future__ import annotations

from migrate.fleet import Fleet
from migrate.offered_work import offered


def rows_of_a_group(fleet: Fleet, instance: str) -> float:
    """Mean rows of a decode step of `instance`: its requests, over the groups that take turns."""
    running = fleet.figures[instance].running
    return running / max(1.0, min(fleet.stage_workers(instance), running))


def busy_with_others(fleet: Fleet, instance: str, worker: str, horizon_s: float) -> float:
    """Share of the time, 0 to 1, in which `worker` is busy with work that is not of `instance`."""
    others = (home for home in fleet.figures if home != instance)
    return min(1.0, sum(share_of(fleet, home, worker, horizon_s) for home in others))


def share_of(fleet: Fleet, instance: str, worker: str, horizon_s: float) -> float:
    """Share of the time in which `worker` is busy with work of `instance`; above 1 where it cannot keep up."""
    figures, times = fleet.figures[instance], fleet.model.times
    prefill = _prefill_tokens_per_s(fleet, instance, horizon_s)
    share = prefill * times.prefill_token_s * fleet.part(instance, worker).prefill_layers
    if figures.running > 0:
        steps_per_s = figures.decode_tokens_per_s / rows_of_a_group(fleet, instance)
        share += steps_per_s * _decode_step_s(fleet, instance, worker)
    return share


def step_s(fleet: Fleet, instance: str, worker: str) -> float:
    """Seconds that a whole step of `instance`, a chunk of prompts and its decodes, keeps `worker` busy."""
    figures = fleet.figures.get(instance)
    if figures is None:
        return 0.0
    prefill_layers = fleet.part(instance, worker).prefill_layers
    chunk_s = figures.prefill_step_tokens * fleet.model.times.prefill_token_s * prefill_layers
    return chunk_s + (_decode_step_s(fleet, instance, worker) if figures.running > 0 else 0.0)


def turn_s(fleet: Fleet, worker: str, horizon_s: float) -> float:
    """Seconds that a call in a worker's engine waits: for a whole step, of its own or of what it hosts, as often as it
    is at one. Whoever asks has just had an answer to something else, when a step had just begun."""
    shares = {home: share_of(fleet, home, worker, horizon_s) for home in fleet.figures}
    all_of_it = max(1.0, sum(shares.values()))
    return sum(share / all_of_it * step_s(fleet, home, worker) for home, share in shares.items())


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
