"""The best that a point can be expected to give, from its neighbours alone (ours).

Along a line of points each objective is taken to lie between its values at the two neighbours, so their better values
together are the best case. Three observations correct it:

- *Trends.* A cost that rises with every GiB and drops once the working set fits is best right behind the drop, better
  than at both neighbours. Where an objective's slope between the neighbours does not lie between the trends on the two
  sides, something happens in between, and the trends are carried on into the gap from both ends. Where the neighbours
  are the ends of the line, the trend is what the size costs on the parallel line that gains least by it.
- *Dips.* Where a parallel line is better in the middle than at both ends (a time-to-live neither too short nor too
  long), as much is hoped for here.
- *Parallel lines.* How far two parallel lines are apart is taken to change one way too: a known middle of the other
  line, shifted by the smaller of the distances at the ends, is another best case. Where the other axis plays no part
  the distances are zero, and a line that repeats its neighbour promises little. It is followed for `_TRUST` of the way
  only: a drop may lie elsewhere on this line.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuning.pareto.hypervolume import Vector
from tuning.pareto.landscape import Landscape
from tuning.pareto.space import Key, with_position

_TRUST = 0.5


def between(landscape: Landscape, key: Key) -> Vector | None:
    """Scaled objectives of `key` at best, from all axes along which it has evaluated points on both sides (the least
    promising of them counts). None when there is no such axis."""
    cases: list[Vector] = []
    beside: list[Vector] = []
    numeric = landscape.space.numeric
    for axis in numeric:
        bracket = landscape.bracket(key, axis)
        if bracket is None:
            continue
        dips = _dips_elsewhere(landscape, bracket, key, axis)
        on_line = in_gap(landscape, landscape.scaled, key, axis)
        cases.append(tuple(value - dip for value, dip in zip(on_line, dips, strict=True)))
        for other in numeric:
            for middle in landscape.neighbours(key, other) if other != axis else ():
                if middle is not None and (case := _beside(landscape, bracket, middle, other)) is not None:
                    beside.append(case)
    if not cases:
        return None
    best = tuple(map(max, zip(*cases, strict=True)))
    if not beside:
        return best
    shifted = tuple(map(max, zip(*beside, strict=True)))
    return tuple(one + _TRUST * max(0.0, other - one) for one, other in zip(best, shifted, strict=True))


def repeated_step(landscape: Landscape, start: Key, end: Key, axis: int) -> tuple[Vector, float] | None:
    """`start` plus what the same step along `axis` did at the nearest place where it was taken, and how far away that
    is: as shares of the axes' lengths, summed, another choice as a whole length. None where it never was taken."""
    taken = [
        (_distance(landscape, start, other), other, moved)
        for other in landscape.scaled
        if other[axis] == start[axis] and (moved := with_position(other, axis, end[axis])) in landscape.scaled
    ]
    if not taken:
        return None
    distance, other, moved = min(taken)
    there = zip(landscape.scaled[start], landscape.scaled[other], landscape.scaled[moved], strict=True)
    return tuple(value + after - before for value, before, after in there), distance


def diminishing_step(landscape: Landscape, start: Key, end: Key, axis: int) -> Vector:
    """`start` plus what its last step towards `end` made better: returns diminish, so the next seldom does more."""
    here = landscape.scaled[start]
    previous = landscape.neighbours(start, axis)[0 if end[axis] > start[axis] else 1]
    if previous is None:
        return here
    return tuple(value + min(0.0, value - old) for value, old in zip(here, landscape.scaled[previous], strict=True))


def in_gap(landscape: Landscape, values: Mapping[Key, Vector], key: Key, axis: int) -> Vector:
    """The best case of `values` (scaled objectives, or constraints) at `key`, which must have evaluated neighbours on
    both sides along `axis`: along this one line."""
    bracket = landscape.bracket(key, axis)
    if bracket is None:
        raise ValueError(f"{key} has no neighbours on both sides along axis {axis}")
    low, high = bracket
    before, after = landscape.neighbours(low, axis)[0], landscape.neighbours(high, axis)[1]
    inside = _slopes(values, low, high, axis)
    trend_before = _slopes(values, before, low, axis) if before is not None else None
    trend_after = _slopes(values, high, after, axis) if after is not None else None
    left = trend_before or trend_after or _parallel_trend(values, low, high, axis)
    right = trend_after or trend_before or left
    distances = key[axis] - low[axis], high[axis] - key[axis]
    return tuple(
        _one_in_gap(*ends, *distances) for ends in zip(values[low], values[high], inside, left, right, strict=True)
    )


def _one_in_gap(low: float, high: float, slope: float, left: float, right: float, below: int, above: int) -> float:
    """One value in a gap, at best: `slope` per step across the gap, `left` and `right` outside of it, at a point
    `below` steps above its low end and `above` steps below its high end."""
    onwards, back = low + left * below, high - right * above
    if left <= slope <= right:  # convex as far as can be seen: above both trends
        return min(low, high, max(onwards, back))
    if right <= slope <= left:
        return min(low, high)
    return min(low, high, onwards, back)


def _dips_elsewhere(landscape: Landscape, bracket: tuple[Key, Key], key: Key, axis: int) -> Vector:
    """By how much each objective is better between the same two positions than at both of them, on the nearest parallel
    line where all three are known. None that is known: zeros."""
    scaled = landscape.scaled
    known = [
        (_distance(landscape, key, other), other, low, high)
        for other in scaled
        if other[axis] == key[axis]
        and (low := with_position(other, axis, bracket[0][axis])) in scaled
        and (high := with_position(other, axis, bracket[1][axis])) in scaled
    ]
    if not known:
        return (0.0,) * len(landscape.reference)
    _, middle, low, high = min(known)
    values = zip(scaled[middle], scaled[low], scaled[high], strict=True)
    return tuple(max(0.0, min(ends) - value) for value, *ends in values)


def _slopes(values: Mapping[Key, Vector], start: Key, end: Key, axis: int) -> Vector:
    """Change of each value per finest step."""
    distance = end[axis] - start[axis]
    return tuple((b - a) / distance for a, b in zip(values[start], values[end], strict=True))


def _parallel_trend(values: Mapping[Key, Vector], low: Key, high: Key, axis: int) -> Vector:
    """The largest rise per step of each value over this stretch of the axis, here or on a parallel line: where
    nothing is gained from a size, its price alone remains."""
    rises = [
        _slopes(values, other, moved, axis)
        for other in values
        if other[axis] == low[axis] and (moved := with_position(other, axis, high[axis])) in values
    ]
    return tuple(map(max, zip(*rises, strict=True)))


def _beside(landscape: Landscape, bracket: tuple[Key, Key], middle: Key, axis: int) -> Vector | None:
    """The best case from a parallel line: its `middle`, shifted by the smaller distance between the lines' ends."""
    ends = [(landscape.scaled[end], landscape.scaled.get(with_position(end, axis, middle[axis]))) for end in bracket]
    shifts = [tuple(a - b for a, b in zip(here, there, strict=True)) for here, there in ends if there is not None]
    if len(shifts) < 2:
        return None
    return tuple(
        value + min(pair) for value, pair in zip(landscape.scaled[middle], zip(*shifts, strict=True), strict=True)
    )


def _distance(landscape: Landscape, first: Key, second: Key) -> float:
    """As shares of the axes' lengths, summed; another choice counts as a whole length."""
    space = landscape.space
    return sum(
        abs(one - other) / axis.num_positions if index in space.numeric else float(one != other)
        for index, (axis, one, other) in enumerate(zip(space.axes, first, second, strict=True))
    )
