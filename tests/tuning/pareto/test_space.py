from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.pareto.space import CategoricalAxis, NumericAxis, SearchSpace

SPACE = SearchSpace(
    (
        NumericAxis("dram_gib", (0, 512, 2048), 64),
        NumericAxis("share", (0.1, 0.4, 1.0), 0.05),
        CategoricalAxis("disk_class", ("slow", "fast")),
    )
)


def test_a_point_is_rounded_to_the_finest_steps() -> None:
    key = SPACE.key({"dram_gib": 500, "share": 0.37, "disk_class": "fast"})
    assert SPACE.point(key) == {"dram_gib": 512, "share": pytest.approx(0.35), "disk_class": "fast"}
    assert key == SPACE.key({"dram_gib": 530, "share": 0.352, "disk_class": "fast"})


@given(st.tuples(st.integers(0, 32), st.integers(0, 18), st.integers(0, 1)))
def test_a_key_leads_back_to_itself(key: tuple[int, ...]) -> None:
    point = SPACE.point(key)
    assert SPACE.key(point) == key
    assert isinstance(point["dram_gib"], int)
    assert isinstance(point["share"], float)
    assert 0.1 <= float(point["share"]) <= 1.0


def test_numbers_of_points() -> None:
    assert SPACE.num_points == 33 * 19 * 2
    assert SPACE.numeric == (0, 1)


def test_coarse_values_between() -> None:
    assert SPACE.coarse_between(0, 0, 32) == (8,)
    assert SPACE.coarse_between(0, 0, 8) == ()
    assert SPACE.is_coarse((8, 6, 1))
    assert not SPACE.is_coarse((9, 6, 1))


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"dram_gib": 2049, "share": 0.5, "disk_class": "slow"}, "0 to 2048"),
        ({"dram_gib": "much", "share": 0.5, "disk_class": "slow"}, "0 to 2048"),
        ({"dram_gib": 0, "share": 0.5, "disk_class": "none"}, "slow, fast"),
        ({"dram_gib": 0, "share": 0.5}, "disk_class"),
        ({"dram_gib": 0, "share": 0.5, "disk_class": "slow", "ttl_s": 1}, "ttl_s"),
    ],
)
def test_points_outside_are_refused(point: dict[str, float | str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SPACE.key(point)


@pytest.mark.parametrize(
    ("coarse", "step", "words"),
    [
        ((), 1, "at least one"),
        ((0, float("inf")), 1, "finite"),
        ((0, 10), 0, "above 0"),
        ((0, 10, 10), 1, "rise"),
        ((0, 10), 4, "whole number of steps"),
    ],
)
def test_axes_that_make_no_sense_are_refused(coarse: tuple[float, ...], step: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NumericAxis("a", coarse, step)


def test_choices_and_names_are_given_once() -> None:
    with pytest.raises(ValueError, match="once"):
        CategoricalAxis("disk_class", ("slow", "slow"))
    with pytest.raises(ValueError, match="own name"):
        SearchSpace((NumericAxis("a", (0, 1), 1), CategoricalAxis("a", ("x",))))
    with pytest.raises(ValueError, match="at least one"):
        SearchSpace(())
