from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.ttl.curves import ReuseCurve, total_block_s
from tuning.ttl.greedy import greedy_choices
from tuning.ttl.plan import GroupTtlPlan, solve
from tuning.ttl.rounding import block_s_of_choices, fitting_choices, hits_of_choices, spend_rest
from tuning.ttl.slsqp import MOST_GROUPS, slsqp_choices
from tuning.ttl.smooth_curves import SmoothCurves
from tuning.ttl.uniform import uniform_ttl_s

HORIZON_S = 30.0


def curve(intervals_s: Sequence[float], num_blocks: int) -> ReuseCurve:
    return ReuseCurve(np.array(intervals_s, np.float64), num_blocks)


CURVES = st.lists(st.builds(curve, st.lists(st.integers(0, 20), max_size=5), st.integers(1, 4)), min_size=1, max_size=4)
BUDGETS_BLOCK_S = st.integers(0, 250).map(float)


def total_hits(curves: Sequence[ReuseCurve], ttls_s: Sequence[float]) -> int:
    return sum(each.hits(ttl_s) for each, ttl_s in zip(curves, ttls_s, strict=True))


def most_hits(curves: Sequence[ReuseCurve], budget_block_s: float) -> int:
    """By trying everything that is worth choosing, with intervals in whole seconds."""
    hits, block_s = np.zeros(1), np.zeros(1)
    for each in curves:
        hits = np.add.outer(hits, [each.hits(ttl_s) for ttl_s in each.choices_s]).ravel()
        block_s = np.add.outer(block_s, [each.block_s(ttl_s) for ttl_s in each.choices_s]).ravel()
    return int(hits[block_s <= budget_block_s].max())


def largest_step(curves: Sequence[ReuseCurve]) -> int:
    return max(int(np.diff(curve.choice_hits[curve.envelope()]).max(initial=0)) for curve in curves)


def plan_of(curves: Sequence[ReuseCurve], budget_block_s: float) -> GroupTtlPlan:
    return solve(curves, budget_block_s, horizon_s=HORIZON_S)


@given(CURVES, BUDGETS_BLOCK_S)
@settings(max_examples=60, deadline=None)
def test_plans_are_near_the_optimum_and_never_below_a_simpler_one(
    curves: list[ReuseCurve], budget_block_s: float
) -> None:
    plan = plan_of(curves, budget_block_s)
    optimum = most_hits(curves, budget_block_s)
    ttls_s = [HORIZON_S if ttl_s is None else ttl_s for ttl_s in plan.ttls_s]
    assert plan.total_hits == total_hits(curves, ttls_s)
    assert plan.total_block_s == total_block_s(curves, ttls_s) <= budget_block_s
    assert optimum - largest_step(curves) <= plan.total_hits <= optimum <= plan.bound_hits + 1e-6
    uniform = [uniform_ttl_s(curves, budget_block_s)] * len(curves)
    assert plan.total_hits >= total_hits(curves, uniform)
    assert plan.total_hits >= hits_of_choices(curves, greedy_choices(curves, budget_block_s).choices)
    assert plan.total_hits >= hits_of_choices(curves, slsqp_choices(curves, budget_block_s))


@given(CURVES, BUDGETS_BLOCK_S)
@settings(deadline=None, max_examples=60)
def test_the_uniform_ttl_is_the_best_single_one(curves: list[ReuseCurve], budget_block_s: float) -> None:
    ttl_s = uniform_ttl_s(curves, budget_block_s)
    fitting = [other for other in range(21) if total_block_s(curves, [other] * len(curves)) <= budget_block_s]
    assert total_block_s(curves, [ttl_s] * len(curves)) <= budget_block_s
    assert total_hits(curves, [ttl_s] * len(curves)) == max(total_hits(curves, [t] * len(curves)) for t in fitting)


def test_most_plans_are_optimal() -> None:
    """On a hundred random cases of four groups: what the solvers miss in all of them together."""
    random = np.random.default_rng(7)
    found, best = 0, 0
    for _ in range(100):
        curves = [curve(random.integers(0, 21, 5).tolist(), int(random.integers(1, 6))) for _ in range(4)]
        budget_block_s = float(random.integers(20, 300))
        found += plan_of(curves, budget_block_s).total_hits
        best += most_hits(curves, budget_block_s)
    assert found >= 0.99 * best


def test_a_group_that_returns_more_is_kept_longer() -> None:
    # 5 hits for 5 + 5 block-seconds, and 1 hit for 4 * 5 + 5 of them.
    often, seldom = curve([1, 1, 1, 1, 1], 5), curve([5], 4)
    plan = plan_of([seldom, often], 20)
    assert plan.ttls_s == (0, 1)
    assert plan.hits == (0, 5)
    assert plan.block_s == (0, 10)


def test_a_budget_that_ends_just_at_a_step_pays_for_it() -> None:
    curves = [curve([3, 9], 1), curve([], 2)]  # 9 + 3 + 9 block-seconds for both hits
    assert plan_of(curves, 21.0).hits == (2, 0)
    assert plan_of(curves, math.nextafter(21.0, 0)).hits == (1, 0)


def test_equal_intervals_make_one_step() -> None:
    curves = [curve([6, 6, 6], 1)]  # 6 + 18 block-seconds
    assert plan_of(curves, 24).ttls_s == (6,)
    assert plan_of(curves, 23.99).ttls_s == (0,)


def test_without_reuse_nothing_is_kept() -> None:
    plan = plan_of([curve([], 4), curve([], 2)], 100)
    assert plan.ttls_s == (0, 0)
    assert (plan.total_hits, plan.total_block_s, plan.bound_hits) == (0, 0, 0)


def test_of_one_group_the_plan_is_the_uniform_ttl() -> None:
    curves = [curve([1, 4, 9, 16], 3)]
    for budget_block_s in range(0, 100, 7):
        assert plan_of(curves, budget_block_s).ttls_s == (uniform_ttl_s(curves, budget_block_s),)


def test_a_budget_for_everything_means_no_limit() -> None:
    curves = [curve([1, 4], 2), curve([], 1)]
    everything = total_block_s(curves, [HORIZON_S, HORIZON_S])
    for budget_block_s in (math.inf, everything):
        plan = plan_of(curves, budget_block_s)
        assert plan.ttls_s == (None, None)
        assert plan.method == "unlimited"
        assert plan.hits == (2, 0)
        assert plan.total_block_s == everything
    assert plan_of(curves, everything - 1).ttls_s == (4, 0)


def test_nothing_to_spend_leaves_uses_at_the_same_time() -> None:
    plan = plan_of([curve([0, 0, 3], 1), curve([2], 1)], 0)
    assert plan.ttls_s == (0, 0)
    assert plan.hits == (2, 0)


def test_a_group_without_blocks_follows_the_uniform_ttl() -> None:
    curves = [curve([], 0), curve([3, 8], 1)]
    assert plan_of(curves, 9).ttls_s == (3, 3)


def test_answers_are_the_same_each_time() -> None:
    random = np.random.default_rng(1)
    curves = [curve(random.exponential(5, 40).tolist(), 10) for _ in range(9)]
    assert slsqp_choices(curves, 900, seed=3) == slsqp_choices(curves, 900, seed=3)


def test_very_many_groups_are_left_to_the_greedy() -> None:
    curves = [curve([1 + number / 100], 1) for number in range(MOST_GROUPS + 1)]
    plan = plan_of(curves, 60)
    assert plan.method in ("greedy", "uniform")
    assert plan.total_hits == int(plan.bound_hits)


@given(CURVES, st.lists(st.floats(-1, 40), min_size=4, max_size=4), BUDGETS_BLOCK_S)
@settings(deadline=None, max_examples=60)
def test_any_ttls_are_made_to_fit(curves: list[ReuseCurve], ttls_s: list[float], budget_block_s: float) -> None:
    proposed = np.array(ttls_s[: len(curves)])
    choices = fitting_choices(curves, proposed, budget_block_s)
    spent = spend_rest(curves, choices, budget_block_s)
    assert block_s_of_choices(curves, choices) <= budget_block_s
    assert block_s_of_choices(curves, spent) <= budget_block_s
    for each, ttl_s, choice, raised in zip(curves, proposed, choices, spent, strict=True):
        assert each.choices_s[choice] <= max(ttl_s, 0)
        assert raised >= choice
        left_block_s = budget_block_s - block_s_of_choices(curves, spent)
        if raised + 1 < len(each.choices_s):
            assert each.choice_block_s[raised + 1] - each.choice_block_s[raised] > left_block_s


def test_smooth_curves_meet_the_exact_ones_and_know_their_slopes() -> None:
    random = np.random.default_rng(5)
    exact = [curve(random.exponential(4, 500).tolist(), 100), curve([2, 7, 7, 11], 3), curve([5], 1)]
    smooth = SmoothCurves(exact)
    assert smooth.longest_s.tolist() == [each.choices_s[-1] for each in exact]
    ends = smooth.at(smooth.longest_s)
    assert np.allclose(ends.hits, [500, 4, 1])
    assert np.allclose(smooth.at(np.array([0.0, 7.0, 0.0])).hits, [0, 3, 0])
    at_nothing = smooth.at(np.zeros(3))
    assert at_nothing.block_s.tolist() == [0, 0, 0]
    for share in (0.013, 0.2, 0.5, 0.77, 0.999):
        ttls_s = share * smooth.longest_s
        here, further, nearer = (smooth.at(ttls_s + step) for step in (0.0, 1e-6, -1e-6))
        assert np.allclose((further.hits - nearer.hits) / 2e-6, here.hits_per_s, rtol=1e-4, atol=1e-4)
        assert np.allclose((further.block_s - nearer.block_s) / 2e-6, here.block_s_per_s, rtol=1e-4)
        # Between the knots of 500 intervals, H is away by less than one of its 32 steps.
        assert abs(here.hits[0] - exact[0].hits(float(ttls_s[0]))) <= 500 / 32


@pytest.mark.parametrize(
    ("curves", "budget_block_s", "horizon_s", "message"),
    [
        ([], 1.0, HORIZON_S, "no groups"),
        ([curve([1], 1)], -1.0, HORIZON_S, "budget_block_s=-1.0"),
        ([curve([1], 1)], math.nan, HORIZON_S, "budget_block_s=nan"),
        ([curve([1], 1)], 1.0, 0.5, "horizon_s=0.5"),
        ([curve([1], 1)], 1.0, math.inf, "horizon_s=inf"),
    ],
)
def test_arguments_without_sense_are_refused(
    curves: list[ReuseCurve], budget_block_s: float, horizon_s: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        solve(curves, budget_block_s, horizon_s=horizon_s)
