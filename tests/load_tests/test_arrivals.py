from __future__ import annotations

import math
from itertools import pairwise

import pytest

from load_tests.arrivals import ArrivalPlan, at_rate, at_times, closed_loop


def test_closed_loop_has_everything_due_at_once() -> None:
    plan = closed_loop(5, in_flight=2)
    assert plan.due_s == (0.0,) * 5
    assert plan.max_in_flight == 2
    assert not plan.is_open_loop


def test_poisson_gaps_are_exponential() -> None:
    plan = at_rate(40_000, rate_per_s=4.0, seed=1)
    gaps_s = [later - earlier for earlier, later in pairwise((0.0, *plan.due_s))]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(0.25, rel=0.02)
    # An exponential's standard deviation is its mean, and it exceeds x times the mean with probability exp(-x).
    assert math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) == pytest.approx(0.25, rel=0.03)
    for factor in (0.5, 1.0, 2.0):
        share = sum(gap > factor * 0.25 for gap in gaps_s) / len(gaps_s)
        assert share == pytest.approx(math.exp(-factor), abs=0.01)
    assert plan.is_open_loop


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_gamma_distributed_gaps(burstiness: float) -> None:
    plan = at_rate(40_000, rate_per_s=4.0, seed=1, burstiness=burstiness)
    gaps_s = [later - earlier for earlier, later in pairwise((0.0, *plan.due_s))]
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(0.25, rel=0.03)
    deviation_s = math.sqrt(sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s))
    assert deviation_s == pytest.approx(0.25 / math.sqrt(burstiness), rel=0.03)


def test_arrivals_are_the_same_for_the_same_seed_only() -> None:
    assert at_rate(50, 2.0, seed=1) == at_rate(50, 2.0, seed=1)
    assert at_rate(50, 2.0, seed=1) != at_rate(50, 2.0, seed=2)


def test_given_times_are_an_open_loop() -> None:
    plan = at_times([0.0, 0.5, 0.5, 2.0])
    assert plan.due_s == (0.0, 0.5, 0.5, 2.0)
    assert plan.is_open_loop


def test_bad_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="must not fall"):
        at_times([1.0, 0.5])
    with pytest.raises(ValueError, match="must not be negative"):
        at_times([-1.0])
    with pytest.raises(ValueError, match="0 requests in flight"):
        ArrivalPlan((0.0,), max_in_flight=0)
    with pytest.raises(ValueError, match="must be above 0"):
        at_rate(1, 0.0, seed=1)
    with pytest.raises(ValueError, match="burstiness is 0"):
        at_rate(1, 1.0, seed=1, burstiness=0.0)
