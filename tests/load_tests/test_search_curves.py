from __future__ import annotations

import itertools

import pytest

from load_tests.search_curves import compare, curve_table, find_problem
from load_tests.storage_like_problems import PROBLEMS
from tuning.pareto.methods import METHODS, uniform_grid

OWN = PROBLEMS["smooth"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_reference_grids_have_200_points_and_miss_coarse_ones(name: str) -> None:
    space = PROBLEMS[name].space
    grid = set(uniform_grid(space, PROBLEMS[name].reference_counts))
    assert len(grid) == 200
    middle = tuple(axis.coarse_positions[2] for axis in space.axes)
    assert middle not in grid


def test_every_method_has_a_rising_curve_for_each_seed() -> None:
    curves = compare(PROBLEMS["smooth"], METHODS, 12, [1, 2])
    assert {method: len(runs) for method, runs in curves.items()} == {
        method: 1 if method == "pareto" else 2 for method in METHODS
    }
    for runs in curves.values():
        for run in runs:
            assert len(run) == 12
            assert all(after >= before - 1e-12 for before, after in itertools.pairwise(run))
    table = curve_table(curves, 12).splitlines()
    assert table[0] == "| method | runs | 10 | 12 | at the end |"
    assert len(table) == 2 + len(METHODS)


def test_the_search_finds_the_cliff_and_as_much_as_the_grid() -> None:
    for name, problem in PROBLEMS.items():
        (curve,) = compare(problem, ["pareto"], 60, [1])["pareto"]
        assert curve[-1] >= 0.99, name


def test_problems_are_found_by_name() -> None:
    assert find_problem("knee") is PROBLEMS["knee"]
    assert find_problem(f"{__name__}:OWN") is OWN
    for name, words in [
        ("hill", "one of smooth"),
        ("no.such.module:x", "no.such|No module"),
        ("math:pi", "SearchProblem"),
    ]:
        with pytest.raises(ValueError, match=words):
            find_problem(name)
