from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna._hypervolume import compute_hypervolume

from tuning.pareto.hypervolume import added_hypervolume, hypervolume

SIDE = 5


def unit_cells(points: list[tuple[int, ...]], num_objectives: int) -> int:
    """Counts the unit cells of [0, SIDE)^n that some point dominates: for integer points that is their volume."""
    cells = itertools.product(range(SIDE), repeat=num_objectives)
    return sum(any(all(map(int.__le__, point, cell)) for point in points) for cell in cells)


@st.composite
def integer_points(draw: st.DrawFn) -> tuple[int, list[tuple[int, ...]]]:
    num_objectives = draw(st.integers(1, 4))
    point = st.tuples(*[st.integers(0, SIDE + 1)] * num_objectives)
    return num_objectives, draw(st.lists(point, max_size=8))


@given(integer_points())
@settings(max_examples=100)
def test_equals_the_number_of_cells(case: tuple[int, list[tuple[int, ...]]]) -> None:
    num_objectives, points = case
    assert hypervolume(points, (SIDE,) * num_objectives) == unit_cells(points, num_objectives)


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 4])
def test_equals_optunas_own(num_objectives: int) -> None:
    rng = np.random.default_rng(7)
    for num_points in (1, 2, 5, 40):
        points = rng.random((num_points, num_objectives))
        points[::3, 0] = points[0, 0]  # ties
        expected = compute_hypervolume(points, np.full(num_objectives, 1.1))
        assert hypervolume(points.tolist(), (1.1,) * num_objectives) == pytest.approx(expected, rel=1e-12)


@given(integer_points(), st.data())
@settings(max_examples=50)
def test_what_a_point_adds(case: tuple[int, list[tuple[int, ...]]], data: st.DataObject) -> None:
    num_objectives, points = case
    point = data.draw(st.tuples(*[st.integers(0, SIDE + 1)] * num_objectives))
    added = unit_cells([*points, point], num_objectives) - unit_cells(points, num_objectives)
    front = [tuple(map(float, each)) for each in points]
    assert added_hypervolume(tuple(map(float, point)), front, (float(SIDE),) * num_objectives) == added


def test_nothing_dominates_nothing() -> None:
    assert hypervolume([], (1.0, 1.0)) == 0.0
    assert hypervolume([(1.0, 0.0)], (1.0, 1.0)) == 0.0


def test_points_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 objectives, the reference point 2"):
        hypervolume([(0.0, 0.0, 0.0)], (1.0, 1.0))
    with pytest.raises(ValueError, match="at least one"):
        hypervolume([], ())
