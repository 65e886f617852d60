"""Group TTLs by return on storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tuning.ttl.curves import ReuseCurve
from tuning.ttl.rounding import hits_of_choices, spend_rest


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """Choices within the budget, and what no choices can exceed."""

    choices: list[int]
    """By group, into `ReuseCurve.choices_s`."""
    bound_hits: float
    """No TTLs within the budget give more hits than this."""


def greedy_choices(curves: Sequence[ReuseCurve], budget_block_s: float) -> GreedyAnswer:
    """Raise TTLs along the concave envelopes, the step with most hits per block-second first, while they fit.

    Choosing one (C, H) point for each group under a budget is the multiple-choice knapsack problem. Its linear
    relaxation is solved by just these steps and a part of the first that does not fit (Sinha and Zoltners, 1979): hence
    the bound, which is above the answer by less than the hits of that step. Then the rest of the budget is spent on
    whatever fits.

    Args:
        budget_block_s: block-seconds, 0 or more.
    """
    steps: list[tuple[float, int, int, float, int]] = []
    for group, curve in enumerate(curves):
        corners = curve.envelope()
        block_s, hits = curve.choice_block_s[corners], curve.choice_hits[corners]
        for corner in range(1, len(corners)):
            more_block_s = float(block_s[corner] - block_s[corner - 1])
            more_hits = int(hits[corner] - hits[corner - 1])
            steps.append((-more_hits / more_block_s, group, int(corners[corner]), more_block_s, more_hits))
    # Within a group the return falls from corner to corner, so its steps stay in order.
    steps.sort()
    choices = [0] * len(curves)
    left_block_s = budget_block_s
    bound_hits = float(hits_of_choices(curves, choices))
    for _, group, choice, more_block_s, more_hits in steps:
        if more_block_s > left_block_s:
            bound_hits += more_hits * left_block_s / more_block_s
            break
        choices[group] = choice
        left_block_s -= more_block_s
        bound_hits += more_hits
    return GreedyAnswer(spend_rest(curves, choices, budget_block_s), bound_hits)
