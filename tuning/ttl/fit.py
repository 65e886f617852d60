"""From a trace and a budget to groups and their times-to-live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuning.trace.trace import PartialBlocks, Trace
from tuning.ttl.curves import ReuseCurve, reuse_curves
from tuning.ttl.groups import group_of_block, group_roots
from tuning.ttl.plan import GroupTtlPlan, solve
from tuning.ttl.uniform import uniform_ttl_s
from tuning.ttl.uses import BlockUses, block_uses


@dataclass(frozen=True, slots=True)
class FitOptions:
    """What is left to choose, beside the budget."""

    coverage: float = 0.9
    """Share of the hits that the groups are to have, see `group_roots`."""
    max_groups: int = 64
    """Beside the rest."""
    partial_blocks: PartialBlocks = "hit"
    """See `block_uses`."""
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class GroupTtlFit:
    """Groups of a trace with their TTLs, and what these were made from."""

    uses: BlockUses
    roots: tuple[int, ...]
    """Block ids by group number, from 1."""
    group_of_block: NDArray[np.int32]
    curves: tuple[ReuseCurve, ...]
    """By group number."""
    plan: GroupTtlPlan
    uniform_ttl_s: float | None
    """The best single TTL for the same budget; None for no limit."""


def fit(trace: Trace, budget_block_s: float, options: FitOptions) -> GroupTtlFit:
    """Choose groups and their TTLs.

    Args:
        budget_block_s: see `solve`.

    Raises:
        TraceUsageError: as `block_uses`.
        ValueError: an argument is not allowed.
    """
    uses = block_uses(trace, options.partial_blocks)
    roots = group_roots(trace, coverage=options.coverage, max_groups=options.max_groups)
    groups = group_of_block(trace, roots)
    curves = reuse_curves(uses, groups, len(roots) + 1)
    plan = solve(curves, budget_block_s, horizon_s=uses.horizon_s, seed=options.seed)
    uniform_s = None if plan.method == "unlimited" else uniform_ttl_s(curves, budget_block_s)
    return GroupTtlFit(uses, roots, groups, curves, plan, uniform_s)
