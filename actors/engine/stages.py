"""Which workers a step of an instance passes through, in order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from migrate.placement import Placement


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers on one worker."""

    worker: str
    layers: range


def stages_of(placement: Placement) -> tuple[Stage, ...]:
    """The stages of a step, by layer: neighbouring ones are on different workers, and together they are all layers.

    Raises:
        ValueError: a layer that is not at home has KV heads on another worker: heads go from home to one worker.
    """
    for layer, (worker, lanes) in enumerate(zip(placement.layer_workers, placement.lane_workers, strict=True)):
        if worker != placement.home and set(lanes) != {worker}:
            away = sorted(set(lanes) - {worker})
            raise ValueError(
                f"layer {layer} is on {worker!r} and has KV heads on {away}; only layers at home may have heads "
                "elsewhere: bring the heads back, or move the layer with them"
            )
    stages, first = [], 0
    for worker, run in itertools.groupby(placement.layer_workers):
        stages.append(Stage(worker, range(first, first + sum(1 for _ in run))))
        first = stages[-1].layers.stop
    return tuple(stages)
