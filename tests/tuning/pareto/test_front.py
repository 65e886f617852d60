from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import ObjectiveScale, least_violating, pareto_front

VECTORS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=12)


@given(VECTORS)
def test_the_front_is_what_nothing_dominates(vectors: list[tuple[int, int, int]]) -> None:
    front = pareto_front({index: Evaluation(vector) for index, vector in enumerate(vectors)})
    for index, vector in enumerate(vectors):
        beaten = any(all(map(int.__le__, other, vector)) and other != vector for other in vectors)
        first_of_its_kind = vectors.index(vector) == index
        assert (index in front) == (first_of_its_kind and not beaten)


def test_infeasible_and_failed_points_are_on_no_front() -> None:
    evaluations = {
        "feasible": Evaluation((2.0, 2.0), (0.0,)),
        "better, but over its limit": Evaluation((1.0, 1.0), (0.1,)),
        "failed": Evaluation((math.nan, 0.0), (0.0,)),
    }
    assert pareto_front(evaluations) == ["feasible"]


def test_the_least_violating_point_is_found_whatever_the_units() -> None:
    evaluations = {
        "half of the one": Evaluation((0.0,), (500.0, -1.0)),
        "all of the one": Evaluation((0.0,), (1000.0, -1.0)),
        "all of the other": Evaluation((0.0,), (-1.0, 0.002)),
        "a quarter of each": Evaluation((0.0,), (250.0, 0.0005)),
        "half of the other, failed": Evaluation((math.nan,), (-1.0, 0.001)),
    }
    # Misses as shares of the largest (1000 and 0.002): 0.5, 1, 1, 0.25 + 0.25.
    assert least_violating(evaluations) == ["half of the one", "a quarter of each"]
    assert least_violating({}) == []


def test_a_scale_maps_ideal_to_zero_and_nadir_to_one() -> None:
    scale = ObjectiveScale.of([(1.0, 30.0, 7.0), (3.0, 10.0, 7.0)])
    assert scale.scaled((1.0, 10.0, 7.0)) == (0.0, 0.0, 0.0)
    assert scale.scaled((3.0, 30.0, 8.0)) == (1.0, 1.0, 0.0)
    assert scale.scaled((2.0, 50.0, 0.0)) == (0.5, 2.0, 0.0)
    # Two corners of a unit square and the strip of 0.1 around it: 1.1 * 0.1 * 2 - 0.1 * 0.1, times 1.1 for the third.
    assert scale.hypervolume([(1.0, 30.0, 7.0), (3.0, 10.0, 7.0)]) == pytest.approx((0.22 - 0.01) * 1.1)


def test_a_scale_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        ObjectiveScale.of([])
