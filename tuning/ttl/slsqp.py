"""Group TTLs by sequential least-squares programming."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from tuning.ttl.curves import ReuseCurve
from tuning.ttl.rounding import block_s_of_choices, fitting_choices, hits_of_choices, spend_rest
from tuning.ttl.smooth_curves import SmoothCurves
from tuning.ttl.uniform import uniform_ttl_s

MOST_GROUPS = 65
"""More are not worth the wait: time grows with their cube, and minutes gave less than the greedy has at once."""
MOST_STEPS = 200
TOLERANCE = 1e-9
SPREAD = 1.0
"""Standard deviation of the logarithm of the factors by which starts are moved."""


def slsqp_choices(curves: Sequence[ReuseCurve], budget_block_s: float, seed: int = 0) -> list[int]:
    """Maximise smooth hits within a smooth budget, from several starts; the best exact answer of them.

    SLSQP from floor(sqrt(K)) + 1 starts is Kareto's (arXiv 2603.08739). The exact hits are a step function, whose slope
    of 0 would end each run at its start, so it sees smooth ones (`SmoothCurves`), each TTL in units of the group's
    longest re-use interval and storage in units of the budget. The first start is the best uniform TTL, the others are
    random multiples of it. What a run says of its success is not asked: its TTLs are clipped, rounded down to re-use
    intervals, shrunk until they hold the exact budget, and what is left of that is spent.

    Args:
        budget_block_s: block-seconds, finite, 0 or more.
        seed: of the starts. Equal arguments give equal answers.

    Returns:
        By group, into `ReuseCurve.choices_s`.
    """
    nothing = spend_rest(curves, [0] * len(curves), budget_block_s)
    active = [group for group, curve in enumerate(curves) if curve.choices_s[-1] > 0]
    if not any(curves[group].choice_block_s[1] <= budget_block_s for group in active):
        return nothing
    smooth = SmoothCurves([curves[group] for group in active])
    all_hits = sum(len(curves[group].intervals_s) for group in active)

    def seconds(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        # SLSQP steps out of its bounds at times, by rounding errors.
        ttls_s: NDArray[np.float64] = np.clip(shares, 0.0, 1.0) * smooth.longest_s
        return ttls_s

    def missed(shares: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        values = smooth.at(seconds(shares))
        return -float(values.hits.sum()) / all_hits, -values.hits_per_s * smooth.longest_s / all_hits

    def left(shares: NDArray[np.float64]) -> float:
        return 1.0 - float(smooth.at(seconds(shares)).block_s.sum()) / budget_block_s

    def left_slope(shares: NDArray[np.float64]) -> NDArray[np.float64]:
        slope: NDArray[np.float64] = -smooth.at(seconds(shares)).block_s_per_s * smooth.longest_s / budget_block_s
        return slope

    best = nothing
    uniform = np.clip(uniform_ttl_s(curves, budget_block_s) / smooth.longest_s, 0.0, 1.0)
    random = np.random.default_rng(seed)
    for start in range(math.isqrt(len(curves) - 1) + 1):
        factors = np.exp(SPREAD * random.standard_normal(len(active))) if start else np.ones(len(active))
        found = minimize(
            missed,
            np.clip(uniform * factors, 0.0, 1.0),
            method="SLSQP",
            jac=True,
            bounds=[(0.0, 1.0)] * len(active),
            constraints={"type": "ineq", "fun": left, "jac": left_slope},
            options={"maxiter": MOST_STEPS, "ftol": TOLERANCE},
        )
        if not np.isfinite(found.x).all():
            continue
        ttls_s = np.zeros(len(curves))
        ttls_s[active] = seconds(found.x)
        choices = spend_rest(curves, fitting_choices(curves, ttls_s, budget_block_s), budget_block_s)
        best = max(
            best, choices, key=lambda those: (hits_of_choices(curves, those), -block_s_of_choices(curves, those))
        )
    return best
