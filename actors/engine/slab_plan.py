"""Where runs of neighbouring slabs for weights can be had, and which slabs of lanes have to make way for them.

Lanes take slabs anywhere, so free slabs lie scattered: there may be enough of them and yet no run. A lane's slab can
be exchanged for a free one by copying its pages. Weights stay where they are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class SlabUse(enum.Enum):
    """What a slab is to the plan."""

    FREE = enum.auto()
    MOVABLE = enum.auto()
    """A lane's; its pages can be copied to a free slab."""
    FIXED = enum.auto()
    """Weights, or a lane's pages that others may be reading or writing."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Runs in the order they were asked for. `moves`: slabs in their way, each with the free slab it goes to; no slab
    is on both sides."""

    runs: tuple[range, ...]
    moves: dict[int, int]


def plan_runs(uses: Sequence[SlabUse], counts: Sequence[int]) -> RunPlan | None:
    """A run of each of `counts` slabs, for each the one with the fewest slabs to copy, the lowest of several (ours).
    None when some run cannot be had."""
    uses = list(uses)
    runs: list[range] = []
    origins: dict[int, int] = {}  # slab that a copy goes to -> slab it comes from
    for count in counts:
        run = _cheapest_run(uses, count)
        if run is None:
            return None
        # From the high end, as lanes take them, so that runs stay free at the low end.
        targets = (slab for slab in range(len(uses) - 1, -1, -1) if slab not in run and uses[slab] is SlabUse.FREE)
        moving = [slab for slab in run if uses[slab] is SlabUse.MOVABLE]
        for slab in moving:
            target = next(targets, None)
            if target is None:
                return None
            uses[target] = SlabUse.MOVABLE
            origins[target] = origins.pop(slab, slab)
        for slab in run:
            uses[slab] = SlabUse.FIXED
        runs.append(run)
    return RunPlan(tuple(runs), {source: target for target, source in origins.items()})


def _cheapest_run(uses: Sequence[SlabUse], count: int) -> range | None:
    best: tuple[int, int] | None = None
    num_fixed = num_movable = 0
    for stop in range(1, len(uses) + 1):
        num_fixed += uses[stop - 1] is SlabUse.FIXED
        num_movable += uses[stop - 1] is SlabUse.MOVABLE
        start = stop - count
        if start > 0:
            num_fixed -= uses[start - 1] is SlabUse.FIXED
            num_movable -= uses[start - 1] is SlabUse.MOVABLE
        if start >= 0 and num_fixed == 0 and (best is None or num_movable < best[0]):
            best = num_movable, start
    return None if best is None else range(best[1], best[1] + count)
