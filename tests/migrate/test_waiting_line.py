"""The order of those that wait, by what it promises of any arrivals and priorities."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.waiting_line import Turn, WaitingLine

STEP_S = 10.0


class Comer(NamedTuple):
    came_s: float
    priority: int


def line_of(comers: list[Comer]) -> WaitingLine[int]:
    """In the order in which they come; each is the number of its place there."""
    line: WaitingLine[int] = WaitingLine()
    for index, comer in enumerate(comers):
        line.add(str(index), index, Turn(comer.came_s + comer.priority * STEP_S, index))
    return line


# In quarters of a second, so that sums are exact and equal moments do occur.
moments_s = st.integers(0, 400).map(lambda quarters: quarters / 4)
comers_in_order = st.lists(st.builds(Comer, moments_s, st.integers(-3, 3)), max_size=20).map(
    lambda comers: sorted(comers, key=lambda comer: comer.came_s)
)


@given(comers_in_order)
def test_who_goes_before_whom(comers: list[Comer]) -> None:
    order = list(line_of(comers))
    assert sorted(order) == list(range(len(comers)))
    for first, later in combinations(order, 2):
        one, other = comers[first], comers[later]
        if one.priority == other.priority:
            assert first < later, "equal priorities go as they came"
        if abs(one.came_s - other.came_s) < STEP_S:
            assert one.priority <= other.priority, "within a step the smaller number goes first"
        if first > later:
            assert one.came_s - other.came_s <= (other.priority - one.priority) * STEP_S, "overtaken for too long"


@given(st.permutations(range(-5, 6)), st.lists(st.integers(0, 39), min_size=11, max_size=11))
def test_jitter_of_less_than_a_step_changes_nothing(priorities: list[int], quarters: list[int]) -> None:
    comers = sorted(Comer(late / 4, priority) for late, priority in zip(quarters, priorities, strict=True))
    assert [comers[index].priority for index in line_of(comers)] == list(range(-5, 6))


@pytest.mark.parametrize("priority", [1, 2, 5])
@pytest.mark.parametrize("a_second", [1, 4])
@pytest.mark.parametrize("backlog", [0, 12])
def test_nobody_starves_however_many_come_that_are_ahead(priority: int, a_second: int, backlog: int) -> None:
    """As many of priority 0 come in each second as are served, for ever. The one with the larger number is overtaken by
    those of its steps, and by nobody after them."""
    line: WaitingLine[str] = WaitingLine()
    names = iter(range(10**6))

    def come(at_s: float) -> None:
        name = next(names)
        line.add(str(name), str(name), Turn(at_s, name))

    for _ in range(backlog):
        come(0.0)
    patient = next(names)
    line.add("patient", "patient", Turn(priority * STEP_S, patient))
    overtaken_by = 0
    for second in range(1, 1000):
        for _ in range(a_second):
            come(float(second))
        served = [line.remove(line.first() or "") for _ in range(a_second)]
        if "patient" in served:
            break
        overtaken_by += sum(int(name or "") > patient for name in served)
    # One comes at the very moment that its turn is.
    assert priority * STEP_S * a_second - backlog - a_second <= overtaken_by <= priority * STEP_S * a_second
    assert second <= priority * STEP_S + backlog / a_second + 1


@given(comers_in_order, st.sets(st.integers(0, 19)))
def test_those_who_leave_change_nobody_elses_place(comers: list[Comer], leaving: set[int]) -> None:
    line = line_of(comers)
    stayed = [index for index in line if index not in leaving]
    for index in leaving:
        assert line.remove(str(index)) == (index if index < len(comers) else None)
        assert str(index) not in line
    assert list(line) == stayed
    assert len(line) == len(stayed)
    assert line.first() == (stayed[0] if stayed else None)


@given(comers_in_order, moments_s)
def test_whoever_comes_knows_how_many_go_before(comers: list[Comer], at_s: float) -> None:
    line = line_of(comers)
    before = line.num_before(at_s)
    line.add("new", -1, Turn(at_s, len(comers)))
    assert list(line).index(-1) == before


def test_an_id_waits_once() -> None:
    line = line_of([Comer(0.0, 0)])
    with pytest.raises(ValueError, match="'0' waits already"):
        line.add("0", 5, Turn(1.0, 1))
