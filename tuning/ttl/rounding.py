"""TTLs that any solver proposes, made into choices that are worth their storage and hold the budget exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuning.ttl.curves import ReuseCurve

HALVINGS = 50


def block_s_of_choices(curves: Sequence[ReuseCurve], choices: Sequence[int]) -> float:
    """Block-seconds of one choice for each group."""
    return math.fsum(curve.choice_block_s[choice] for curve, choice in zip(curves, choices, strict=True))


def hits_of_choices(curves: Sequence[ReuseCurve], choices: Sequence[int]) -> int:
    """Hits of one choice for each group."""
    return sum(int(curve.choice_hits[choice]) for curve, choice in zip(curves, choices, strict=True))


def fitting_choices(curves: Sequence[ReuseCurve], ttls_s: NDArray[np.float64], budget_block_s: float) -> list[int]:
    """The TTLs rounded down to choices; where these break the budget, all TTLs are shrunk by one factor first.

    Args:
        ttls_s: finite, one for each curve; below 0 counts as 0.
        budget_block_s: 0 or more.
    """

    def rounded(factor: float) -> list[int]:
        return [curve.choice_at_most(factor * ttl_s) for curve, ttl_s in zip(curves, ttls_s.tolist(), strict=True)]

    choices = rounded(1.0)
    if block_s_of_choices(curves, choices) <= budget_block_s:
        return choices
    fits, breaks = 0.0, 1.0  # at 0 nothing is kept, which costs nothing
    for _ in range(HALVINGS):
        middle = (fits + breaks) / 2
        if block_s_of_choices(curves, rounded(middle)) <= budget_block_s:
            fits = middle
        else:
            breaks = middle
    return rounded(fits)


def spend_rest(curves: Sequence[ReuseCurve], choices: Sequence[int], budget_block_s: float) -> list[int]:
    """Raise choices while the budget allows: each time those of the group that gains most hits, as far as it goes.

    What is raised once cannot be raised again, so there are at most as many rounds as groups.

    Args:
        choices: within the budget.
    """
    spent = list(choices)
    while True:
        left_block_s = budget_block_s - block_s_of_choices(curves, spent)
        most_hits, raised, new_choice = 0, -1, -1
        for group, curve in enumerate(curves):
            reach = float(curve.choice_block_s[spent[group]]) + left_block_s
            choice = int(np.searchsorted(curve.choice_block_s, reach, "right")) - 1
            gained = int(curve.choice_hits[choice] - curve.choice_hits[spent[group]])
            if gained > most_hits:
                most_hits, raised, new_choice = gained, group, choice
        if raised < 0:
            return spent
        before = spent[raised]
        spent[raised] = new_choice
        if block_s_of_choices(curves, spent) > budget_block_s:  # by a rounding error of the sums above
            spent[raised] = before
            return spent
