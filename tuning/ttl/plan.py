"""The times-to-live of all groups that a budget of storage pays for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuning.ttl.curves import ReuseCurve, total_block_s
from tuning.ttl.greedy import greedy_choices
from tuning.ttl.rounding import block_s_of_choices, hits_of_choices, spend_rest
from tuning.ttl.slsqp import MOST_GROUPS, slsqp_choices
from tuning.ttl.uniform import uniform_ttl_s

Method = Literal["unlimited", "slsqp", "greedy", "uniform"]


@dataclass(frozen=True, slots=True)
class GroupTtlPlan:
    """TTLs by group number, the rest first, with what they give and take in the trace that they were made from."""

    ttls_s: tuple[float | None, ...]
    """None for no limit. 0 keeps a block for uses at the same time only."""
    hits: tuple[int, ...]
    block_s: tuple[float, ...]
    """Block-seconds; of a group without limit those of a TTL as long as the trace."""
    budget_block_s: float
    method: Method
    """Whose answer it is; "unlimited" where the budget pays for everything."""
    bound_hits: float
    """No group TTLs within the budget give more hits."""

    @property
    def total_hits(self) -> int:
        return sum(self.hits)

    @property
    def total_block_s(self) -> float:
        return math.fsum(self.block_s)


def solve(curves: Sequence[ReuseCurve], budget_block_s: float, *, horizon_s: float, seed: int = 0) -> GroupTtlPlan:
    """Maximise the hits of all groups within a budget (Kareto, arXiv 2603.08739).

    The best answer of SLSQP (of up to `MOST_GROUPS` groups), the greedy by return on storage, and the best uniform TTL:
    most hits, then least storage.
    Each is made of re-use intervals and holds the budget by the exact formula. It is away from the optimum by less than
    the hits of one step of one group's concave envelope, see `greedy_choices`; `bound_hits` says how far it is at most.

    A group without blocks, of which the trace says nothing, gets the uniform TTL.

    Args:
        curves: by group number, at least that of the rest.
        budget_block_s: blocks that may be held on average, times the length of the trace in seconds. Infinite for no
            limit.
        horizon_s: length of the trace in seconds, which stands for a TTL without limit.
        seed: of SLSQP's starts.

    Raises:
        ValueError: there is no curve, the budget is below 0 or not a number, or a re-use interval is longer than the
            trace.
    """
    if not curves:
        raise ValueError("no groups were given: give at least the curve of the rest")
    if not budget_block_s >= 0:
        raise ValueError(f"budget_block_s={budget_block_s} is not allowed: give block-seconds, 0 or more")
    longest_s = max(float(curve.choices_s[-1]) for curve in curves)
    if not longest_s <= horizon_s < math.inf:
        raise ValueError(f"horizon_s={horizon_s} is not allowed: there is a re-use interval of {longest_s} s")
    if total_block_s(curves, [horizon_s] * len(curves)) <= budget_block_s:
        return GroupTtlPlan(
            ttls_s=(None,) * len(curves),
            hits=tuple(len(curve.intervals_s) for curve in curves),
            block_s=tuple(curve.block_s(horizon_s) for curve in curves),
            budget_block_s=budget_block_s,
            method="unlimited",
            bound_hits=float(sum(len(curve.intervals_s) for curve in curves)),
        )
    uniform_s = uniform_ttl_s(curves, budget_block_s)
    rounded = [curve.choice_at_most(uniform_s) for curve in curves]
    greedy = greedy_choices(curves, budget_block_s)
    answers: dict[Method, list[int]] = {}
    if len(curves) <= MOST_GROUPS:
        answers["slsqp"] = slsqp_choices(curves, budget_block_s, seed)
    answers["greedy"] = greedy.choices
    answers["uniform"] = spend_rest(curves, rounded, budget_block_s)
    # The first of equals.
    method = max(
        answers,
        key=lambda name: (hits_of_choices(curves, answers[name]), -block_s_of_choices(curves, answers[name])),
    )
    ttls_s = [
        float(curve.choices_s[choice]) if curve.num_blocks else uniform_s
        for curve, choice in zip(curves, answers[method], strict=True)
    ]
    return GroupTtlPlan(
        ttls_s=tuple(ttls_s),
        hits=tuple(curve.hits(ttl_s) for curve, ttl_s in zip(curves, ttls_s, strict=True)),
        block_s=tuple(curve.block_s(ttl_s) for curve, ttl_s in zip(curves, ttls_s, strict=True)),
        budget_block_s=budget_block_s,
        method=method,
        bound_hits=greedy.bound_hits,
    )
