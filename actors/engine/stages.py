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
    if placement.torn_layers:
        raise ValueError(
            f"layers {list(placement.torn_layers)} are not at home and have KV heads on another worker; only layers at "
            "home may: bring the heads back, or move the layers with them"
        )
    stages, first = [], 0
    for worker, run in itertools.groupby(placement.layer_workers):
        stages.append(Stage(worker, range(first, first + sum(1 for _ in run))))
        first = stages[-1].layers.stop
    return tuple(stages)
