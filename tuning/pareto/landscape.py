"""What the evaluated points show together: the front, one scale, and who is whose neighbour along which axis."""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import REFERENCE, ObjectiveScale, least_violating, pareto_front
from tuning.pareto.hypervolume import Vector, added_hypervolume
from tuning.pareto.space import Key, SearchSpace, with_position


class Landscape:
    """A snapshot for one decision; depends on the evaluations alone, not on their order.

    Objectives are scaled by the front's ideal and nadir: that is the range within which anybody will choose, and a
    hopeless point (an overloaded instance) doesn't flatten everything else. Where the front has no range in an
    objective, the range of all points counts.
    """

    def __init__(self, space: SearchSpace, evaluations: Mapping[Key, Evaluation]) -> None:
        self.space = space
        self.evaluations = {key: evaluations[key] for key in sorted(evaluations) if evaluations[key].failure is None}
        self.failed = evaluations.keys() - self.evaluations.keys()
        self.has_feasible = any(each.is_feasible for each in self.evaluations.values())
        self.front = tuple(pareto_front(self.evaluations))
        self.leads = self.front or tuple(least_violating(self.evaluations))
        """Where the search goes on from: the front, or the points that miss their constraints by least."""
        scale = self._scale()
        self.scaled = {key: scale.scaled(each.objectives) for key, each in self.evaluations.items()}
        self._has_range = [worst > best for best, worst in zip(scale.ideal, scale.nadir, strict=True)]
        self.constraints: dict[Key, Vector] = {key: each.constraints for key, each in self.evaluations.items()}
        self.front_vectors = [self.scaled[key] for key in self.front]
        self.reference: Vector = (REFERENCE,) * len(scale.ideal)
        self.leads_by_weight = self._by_weight()
        self._lines: dict[tuple[int, Key], list[int]] = defaultdict(list)
        for key in self.scaled:
            for axis in space.numeric:
                self._lines[axis, with_position(key, axis, 0)].append(key[axis])
        for positions in self._lines.values():
            positions.sort()

    def neighbours(self, key: Key, axis: int) -> tuple[Key | None, Key | None]:
        """The nearest evaluated points below and above `key` along a numeric axis; `key` itself need not be one."""
        positions = self._lines.get((axis, with_position(key, axis, 0)), [])
        below = bisect.bisect_left(positions, key[axis]) - 1
        above = bisect.bisect_right(positions, key[axis])
        return (
            with_position(key, axis, positions[below]) if below >= 0 else None,
            with_position(key, axis, positions[above]) if above < len(positions) else None,
        )

    def line(self, key: Key, axis: int) -> list[Key]:
        """All evaluated points that differ from `key` along a numeric axis at most, from low to high."""
        return [with_position(key, axis, at) for at in self._lines.get((axis, with_position(key, axis, 0)), [])]

    def bracket(self, key: Key, axis: int) -> tuple[Key, Key] | None:
        below, above = self.neighbours(key, axis)
        return None if below is None or above is None else (below, above)

    def gaps(self) -> list[tuple[int, Key, Key]]:
        """(axis, low, high) for all pairs of evaluated points that are neighbours along a numeric axis."""
        return [
            (axis, with_position(rest, axis, low), with_position(rest, axis, high))
            for (axis, rest), positions in self._lines.items()
            for low, high in itertools.pairwise(positions)
        ]

    def gain(self, start: Key, end: Key) -> float:
        """By how much `end` is better than `start` in the objective that gains most, scaled; negative when in none."""
        return max(before - after for before, after in zip(self.scaled[start], self.scaled[end], strict=True))

    def improved(self, vector: Vector, by: float) -> Vector:
        """`vector`, better by so much in each objective that has a range."""
        return tuple(value - by * ranged for value, ranged in zip(vector, self._has_range, strict=True))

    def _by_weight(self) -> list[Key]:
        """The leading points, those first without which the front would lose most hypervolume."""
        if not self.front:
            return list(self.leads)
        weights = {
            key: added_hypervolume(
                self.scaled[key], [self.scaled[other] for other in self.front if other != key], self.reference
            )
            for key in self.front
        }
        return sorted(self.front, key=lambda key: (-weights[key], key))

    def _scale(self) -> ObjectiveScale:
        if not self.evaluations:
            return ObjectiveScale((), ())
        ends = ObjectiveScale.of([self.evaluations[key].objectives for key in self.leads])
        everything = ObjectiveScale.of([each.objectives for each in self.evaluations.values()])
        nadir = tuple(
            worst if worst > best else max(worst, farthest)
            for best, worst, farthest in zip(ends.ideal, ends.nadir, everything.nadir, strict=True)
        )
        return ObjectiveScale(ends.ideal, nadir)
