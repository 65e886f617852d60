"""The volume that a set of points dominates: exact, for any number of objectives, all minimised.

Two objectives are a staircase; three a sweep over the third that keeps the staircase of the first two; each further one
is cut into slices of one objective less ("hypervolume by slicing objectives", While et al. 2006). Time grows as
n^(objectives - 2) * n log n: meant for the fronts of hundreds of points and the three objectives of this project.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

Vector = tuple[float, ...]


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Volume of the union of boxes from each point to `reference`. Points that are not below it in every objective add
    nothing. Raises ValueError when a point has another number of objectives than the reference, or that has none."""
    if not reference:
        raise ValueError("the reference point has no objectives; give at least one")
    for point in points:
        if len(point) != len(reference):
            raise ValueError(f"a point has {len(point)} objectives, the reference point {len(reference)}")
    inside = {tuple(point) for point in points if all(a < b for a, b in zip(point, reference, strict=True))}
    return _volume(list(inside), tuple(reference))


def added_hypervolume(point: Vector, front: Sequence[Vector], reference: Vector) -> float:
    """What `point` would add to the volume of `front`: its own box less the part that the front dominates already."""
    box = 1.0
    for value, limit in zip(point, reference, strict=True):
        box *= max(0.0, limit - value)
    if box == 0.0:
        return 0.0
    return max(0.0, box - hypervolume([tuple(map(max, point, other)) for other in front], reference))


class _Staircase:
    """Area dominated in two objectives by the points added so far."""

    def __init__(self, reference: tuple[float, float]) -> None:
        self.area = 0.0
        self._limit_x, self._limit_y = reference
        self._xs: list[float] = []  # rising
        self._ys: list[float] = []  # falling

    def add(self, x: float, y: float) -> None:
        at = bisect.bisect_right(self._xs, x)
        ceiling = self._ys[at - 1] if at else self._limit_y
        if ceiling <= y:
            return
        start = at - 1 if at and self._xs[at - 1] == x else at  # a point above this one goes
        end, left = at, x
        while end < len(self._xs) and self._ys[end] >= y:
            self.area += (self._xs[end] - left) * (ceiling - y)
            left, ceiling = self._xs[end], self._ys[end]
            end += 1
        right = self._xs[end] if end < len(self._xs) else self._limit_x
        self.area += (right - left) * (ceiling - y)
        self._xs[start:end] = [x]
        self._ys[start:end] = [y]


def _volume(points: list[Vector], reference: Vector) -> float:
    if not points:
        return 0.0
    if len(reference) == 1:
        return float(reference[0] - min(point[0] for point in points))
    if len(reference) == 2:
        staircase = _Staircase((reference[0], reference[1]))
        for x, y in points:
            staircase.add(x, y)
        return staircase.area
    points = sorted(points, key=lambda point: point[-1])
    ends = [*(point[-1] for point in points[1:]), reference[-1]]
    volume = 0.0
    if len(reference) == 3:
        staircase = _Staircase((reference[0], reference[1]))
        for (x, y, z), end in zip(points, ends, strict=True):
            staircase.add(x, y)
            volume += staircase.area * (end - z)
        return volume
    for count, (point, end) in enumerate(zip(points, ends, strict=True), start=1):
        if end > point[-1]:
            slice_ = list({other[:-1] for other in points[:count]})
            volume += _volume(slice_, reference[:-1]) * (end - point[-1])
    return volume
