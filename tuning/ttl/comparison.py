"""Group TTLs beside one TTL for all and beside LRU, all with the same budget."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv.policy.lru import LruPolicy
from kv.policy.ttl import TtlPolicy
from tuning.trace.trace import Trace
from tuning.ttl.fit import FitOptions, GroupTtlFit, fit
from tuning.ttl.groups import group_of_block
from tuning.ttl.policy import SHORTEST_TTL_S
from tuning.ttl.pool import pool_reuse_ratio
from tuning.ttl.replay import Residence, residence, ttl_reuse_ratio
from tuning.ttl.uses import BlockUses, block_uses


@dataclass(frozen=True, slots=True)
class EqualBudget:
    """Re-use ratios, which are hits by prefix over block uses, within one budget.

    LRU has a pool of as many blocks as the budget holds on average, and never more. TTLs by themselves hold more at
    times, and all the time where there is more traffic than in the trace that they are made from. In the pool they are
    what the live store makes of a policy file: what has not expired goes by LRU when the pool is full.
    """

    lru: float
    uniform_ttl: float
    group_ttl: float
    group_ttl_in_pool: float
    pool_blocks: int
    uniform_held: Residence
    group_held: Residence

    @property
    def gain(self) -> float:
        """Of group TTLs over the uniform one, as a share of it; 0 where that one has no hits."""
        return self.group_ttl / self.uniform_ttl - 1 if self.uniform_ttl else 0.0


def on_the_same_trace(fitted: GroupTtlFit) -> EqualBudget:
    """On the very trace that the groups and TTLs are made from: with hindsight."""
    return _compare(fitted, fitted.uses, fitted.group_of_block, 0)


def on_the_second_half(trace: Trace, budget_block_s: float, options: FitOptions) -> EqualBudget | None:
    """On the second half of a trace, with groups and TTLs made from the first, as they would be used. (ours)

    With hindsight a tuner gives long TTLs to the very sessions that go on. Only what comes again later is worth a place
    in a policy file.

    Args:
        budget_block_s: for the whole trace. The first half has as many blocks on average.

    Returns:
        None where a half is no trace: with fewer than two requests, or where the first takes no time.
    """
    half = len(trace) // 2
    if half < 1:
        return None
    first = trace.head(half)
    uses = block_uses(trace, options.partial_blocks)
    first_horizon_s = float(first.arrival_s[-1])
    if first_horizon_s == 0 or uses.request_offsets[half] == len(uses.block_ids):
        return None
    fitted = fit(first, budget_block_s * (first_horizon_s / uses.horizon_s), options)
    # The first half numbers its blocks as the whole does.
    return _compare(fitted, uses, group_of_block(trace, fitted.roots), half)


def _compare(fitted: GroupTtlFit, uses: BlockUses, groups: NDArray[np.int32], first_request: int) -> EqualBudget:
    horizon_s = fitted.uses.horizon_s
    # In a trace that takes no time all blocks are there at once, and cost nothing.
    blocks = fitted.plan.budget_block_s / horizon_s if horizon_s else uses.num_ids
    # A budget that was a whole number of blocks is still one after its division.
    pool_blocks = int(min(blocks * (1 + 1e-12), uses.num_ids))
    group_ttls_s = fitted.plan.ttls_s
    uniform_ttls_s = (fitted.uniform_ttl_s,) * len(group_ttls_s)
    policy = TtlPolicy(LruPolicy(), [None if ttl_s is None else max(ttl_s, SHORTEST_TTL_S) for ttl_s in group_ttls_s])
    return EqualBudget(
        lru=pool_reuse_ratio(uses, LruPolicy(), groups, pool_blocks, first_request),
        uniform_ttl=ttl_reuse_ratio(uses, groups, uniform_ttls_s, first_request),
        group_ttl=ttl_reuse_ratio(uses, groups, group_ttls_s, first_request),
        group_ttl_in_pool=pool_reuse_ratio(uses, policy, groups, pool_blocks, first_request),
        pool_blocks=pool_blocks,
        uniform_held=residence(uses, groups, uniform_ttls_s, first_request),
        group_held=residence(uses, groups, group_ttls_s, first_request),
    )
