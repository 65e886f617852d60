"""What a move did to memory, counters and links, from what workers said of themselves before and after it, and what it
should have done.

A worker's reading is its `state` in `GET /debug/moves`; placements are those of the same answer. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from migrate.moves import LayerMove, Move

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes at the source of a move."""

    weights_expected: int
    weights: int
    kv_expected: int
    kv: int
    """At a home, by so much its lanes that stayed have grown, freed weights left out: what leaves becomes their room at
    once, in whole slabs. At a host, what it had for the instance and has no more."""


@dataclass(frozen=True, slots=True)
class StepsAfter:
    """Steps that layers were run for in some time after a move; None where nobody can tell, as of heads, whose layers
    are run where they were."""

    moved_at_source: int | None
    moved_at_destination: int | None
    stayed_at_home: int


def freed(move: Move, before: Json, after: Json, layer_bytes: int, num_kv_heads: int) -> Freed:
    """`before` and `after`: answers of `GET /debug/moves`. `layer_bytes`: weights of one layer."""
    source_before, source_after = _state(before, move.source), _state(after, move.source)
    moved_lanes, had = len(_lanes(move, num_kv_heads)), _lanes_here(before, move.instance, move.source, num_kv_heads)
    weights = source_before["weight_bytes"] - source_after["weight_bytes"]
    if move.source == move.instance:
        kv_before = source_before["kv_bytes"]
        kv = source_after["kv_bytes"] - kv_before * (had - moved_lanes) // max(1, had) - weights
    else:
        kv_before = _hosted(source_before, move.instance).get("kv_bytes", 0)
        kv = kv_before - _hosted(source_after, move.instance).get("kv_bytes", 0)
    return Freed(
        weights_expected=layer_bytes * len(_weights_that_leave(move, before)),
        weights=weights,
        kv_expected=kv_before * moved_lanes // max(1, had),
        kv=kv,
    )


def steps_after(move: Move, after: Json, later: Json) -> StepsAfter:
    """Between two answers of `GET /debug/moves` that were both given after the move, with everything where it was."""
    stayed = _steps(later, move.instance, move.instance, None) - _steps(after, move.instance, move.instance, None)
    if not isinstance(move, LayerMove):
        return StepsAfter(None, None, stayed)
    layers = list(move.layers)
    source, destination = (
        _steps(later, move.instance, worker, layers) - _steps(after, move.instance, worker, layers)
        for worker in (move.source, move.destination)
    )
    return StepsAfter(source, destination, stayed)


def link_bytes(move: Move, before: Json, after: Json) -> int:
    """Payload that went from source to destination meanwhile: the move's, and that of steps and their answers."""

    def sent(answer: Json) -> int:
        return int(_state(answer, move.source)["links"].get(move.destination, {}).get("bytes_sent", 0))

    return sent(after) - sent(before)


def _state(answer: Json, worker: str) -> Json:
    state: Json = answer["workers"][worker]["state"]
    return state


def _hosted(state: Json, instance: str) -> Json:
    return next((part for part in state["hosted"] if part["instance"] == instance), {})


def _lanes(move: Move, num_kv_heads: int) -> set[tuple[int, int]]:
    heads = range(num_kv_heads) if isinstance(move, LayerMove) else move.heads
    return {(layer, head) for layer in move.layers for head in heads}


def _lanes_here(answer: Json, instance: str, worker: str, num_kv_heads: int) -> int:
    """Lanes of an instance on a worker."""
    placement = _placement(answer, instance)
    lanes = len(placement["layers"].get(worker, ())) * num_kv_heads
    for part in placement["heads"]:
        owner_here = set(placement["layers"].get(worker, ())) & set(part["layers"])
        lanes -= len(owner_here) * len(part["heads"])
        if part["worker"] == worker:
            lanes += len(part["layers"]) * len(part["heads"])
    return lanes


def _placement(answer: Json, instance: str) -> Json:
    placement: Json = next(each for each in answer["placements"] if each["instance"] == instance)
    return placement


def _weights_that_leave(move: Move, before: Json) -> set[int]:
    """Layers that move and that no other instance runs at the source: all run the same weights."""
    if not isinstance(move, LayerMove):
        return set()
    others = [each for each in before["placements"] if each["instance"] != move.instance]
    kept = {layer for placement in others for layer in placement["layers"].get(move.source, ())}
    return set(move.layers) - kept


def _steps(answer: Json, instance: str, worker: str, layers: list[int] | None) -> int:
    """Steps of these layers of an instance on a worker, added up; None: of the layer at home that was run most."""
    state = _state(answer, worker)
    if worker == instance:
        steps: list[int] = state["layer_steps"]
        return max(steps) if layers is None else sum(steps[layer] for layer in layers)
    hosted = _hosted(state, instance).get("layer_steps", {})
    return sum(hosted.get(str(layer), 0) for layer in layers or ())
