from __future__ import annotations

import pytest

from tuning.pareto.methods import grid_counts, shuffled, uniform_grid
from tuning.pareto.space import CategoricalAxis, NumericAxis, SearchSpace

PLANE = SearchSpace((NumericAxis("dram_gib", (0, 512, 1024), 8), NumericAxis("ttl_s", (0, 600), 60)))
CLASSES = SearchSpace((*PLANE.axes, CategoricalAxis("disk_class", ("slow", "fast"))))


def test_a_grid_is_even_from_end_to_end() -> None:
    points = [PLANE.point(key) for key in uniform_grid(PLANE, (5, 3))]
    assert sorted({point["dram_gib"] for point in points}) == [0, 256, 512, 768, 1024]
    assert sorted({point["ttl_s"] for point in points}) == [0, 300, 600]
    assert len(points) == 15


def test_one_point_stands_in_the_middle() -> None:
    assert [PLANE.point(key)["dram_gib"] for key in uniform_grid(PLANE, (1, 2))] == [512, 512]


@pytest.mark.parametrize(("budget", "counts"), [(1, (1, 1)), (60, (8, 7)), (200, (18, 11)), (10**6, (129, 11))])
def test_the_finest_even_grid_within_a_budget(budget: int, counts: tuple[int, ...]) -> None:
    assert grid_counts(PLANE, budget) == counts


def test_all_choices_are_in_a_grid() -> None:
    assert grid_counts(CLASSES, 60) == (6, 5, 2)
    with pytest.raises(ValueError, match="can't be left out"):
        uniform_grid(CLASSES, (2, 2, 1))
    with pytest.raises(ValueError, match="one for each of the 3 axes"):
        uniform_grid(CLASSES, (2, 2))


def test_each_seed_has_its_order() -> None:
    keys = uniform_grid(PLANE, (5, 3))
    assert sorted(shuffled(keys, 1)) == sorted(keys)
    assert shuffled(keys, 1) == shuffled(keys, 1) != shuffled(keys, 2)
