"""What a move would do, worked out before it is made: loads, latencies, bytes, seconds and room."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from migrate.fleet import Fleet
from migrate.inter_token import inter_token_s
from migrate.move_settings import MoveSettings
from migrate.moves import Move
from migrate.utilisation import Utilisation, utilisation
from migrate.worker_share import turn_s

HOME_TURNS: Final = 2
"""Calls in the engine's thread of the instance's home for which a move waits while steps go on: to begin, and to hold
the steps. See `actors/moves/layer_moves.py`."""
TURNS_FOR_WEIGHTS: Final = 1
"""The same for which one waits that has weights to copy, besides."""
HOST_TURNS: Final = 1
"""The same at the host: for the grant, or to take back what it had."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Before and after one move, under today's traffic."""

    before: Mapping[str, Utilisation]
    """Of source and destination."""
    after: Mapping[str, Utilisation]
    itl_before_s: Mapping[str, float]
    """Inter-token latency of each worker's own instance that has a part on either end, or hosts parts of the moved one;
    0 where nothing is decoded."""
    itl_after_s: Mapping[str, float]
    weight_bytes: int
    """Weights to transfer: those that the destination does not have."""
    kv_bytes: int
    """KV to transfer: of live requests, and what is cached beside it, unless that stays behind."""
    transfer_s: float
    """From the beginning of the move to its end."""
    waiting_s: float
    """The part of it in which copies are slower beside steps, and calls wait for them: both ends serve meanwhile as if
    nothing moved."""
    turns_s: float
    """The part of that in which calls wait for steps."""
    needed_bytes: int
    """Room that the move needs at the destination, and how much there is."""
    free_bytes: int
    grant_blocks: int
    """How many blocks of the moved lanes the destination should take, when there is room."""

    @property
    def transfer_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def busy_before(self) -> float:
        """Share of its time, and more where there is a backlog, that the busier end has work for."""
        return max(end.compute for end in self.before.values())

    @property
    def peak_before(self) -> float:
        """The higher U of the two ends."""
        return max(end.weighted for end in self.before.values())

    @property
    def peak_after(self) -> float:
        return max(end.weighted for end in self.after.values())


def predict(fleet: Fleet, move: Move, settings: MoveSettings) -> Prediction:
    """Work out what `move` would do to `fleet`, which knows both ends and the instance's home.

    Raises:
        ValueError: see `after` of the move.
    """
    later = fleet.moved(move)
    ends = (move.source, move.destination)
    # A third worker that hosts parts of the instance is offered more of it when that gets through more elsewhere.
    touched = [
        home
        for home in sorted(fleet.figures)
        if fleet.part(move.instance, home).lanes
        or any(home == end or fleet.part(home, end).lanes or later.part(home, end).lanes for end in ends)
    ]
    sizes = fleet.model.sizes
    new_layers = later.layers_with_weights(move.destination) - fleet.layers_with_weights(move.destination)
    weight_bytes = len(new_layers) * sizes.layer_weight_bytes
    new_lanes = later.part(move.instance, move.destination).lanes - fleet.part(move.instance, move.destination).lanes
    figures = fleet.figures[move.instance]
    live_blocks = figures.live_blocks
    least_blocks = max(1, math.ceil(settings.memory_headroom * live_blocks))
    needed_bytes = weight_bytes + new_lanes * least_blocks * sizes.page_bytes
    free_bytes = fleet.free_bytes(move.destination, settings.memory_headroom)
    most_blocks = (free_bytes - weight_bytes) // (new_lanes * sizes.page_bytes)
    grant_blocks = min(most_blocks, max(least_blocks, fair_blocks(later, move.instance, move.destination)))
    # What is cached, and does not stay behind, goes along as far as the destination takes it.
    copied_blocks = max(live_blocks, min(grant_blocks, live_blocks + figures.cached_blocks))
    kv_bytes = new_lanes * copied_blocks * sizes.page_bytes
    before = {end: utilisation(fleet, end, settings) for end in ends}
    host = move.destination if move.source == move.instance else move.source
    home_turns = HOME_TURNS + (TURNS_FOR_WEIGHTS if weight_bytes else 0)
    turns_s = home_turns * turn_s(fleet, move.instance, settings.horizon_s)
    turns_s += HOST_TURNS * turn_s(fleet, host, settings.horizon_s)
    waiting_s = turns_s + fleet.model.waiting_s(weight_bytes + kv_bytes, max(end.compute for end in before.values()))
    return Prediction(
        before=before,
        after={end: utilisation(later, end, settings) for end in ends},
        itl_before_s={home: inter_token_s(fleet, home, settings.horizon_s) for home in touched},
        itl_after_s={home: inter_token_s(later, home, settings.horizon_s) for home in touched},
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        transfer_s=fleet.model.copy_s(weight_bytes + kv_bytes, *ends) + waiting_s,
        waiting_s=waiting_s,
        turns_s=turns_s,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        grant_blocks=grant_blocks,
    )


def fair_blocks(fleet: Fleet, instance: str, worker: str) -> int:
    """Blocks of the instance's lanes on `worker` if its memory is shared out by what each instance has live (ours).

    All lanes there are then equally full. Each instance counts as having one block more than it has, so that memory
    that nobody uses is shared out evenly. More than home itself has room for would be of no use.
    """
    figures = fleet.figures.values()
    wanted = {item.worker: (item.live_blocks + 1) * fleet.part(item.worker, worker).lanes for item in figures}
    pages = fleet.kv_bytes(worker) // fleet.model.sizes.page_bytes
    blocks = pages * wanted[instance] // (sum(wanted.values()) * fleet.part(instance, worker).lanes)
    hosted = sum(
        item.total_blocks * fleet.part(item.worker, instance).lanes for item in figures if item.worker != instance
    )
    pages_at_home = fleet.kv_bytes(instance) // fleet.model.sizes.page_bytes - hosted
    return min(blocks, pages_at_home // fleet.part(instance, instance).lanes)
