"""Which points no other point beats, and one scale for objectives of different units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.hypervolume import Vector, hypervolume

REFERENCE = 1.1
"""The reference point, in each scaled objective: a little behind the nadir, so that the ends of a front count too."""

_K = TypeVar("_K")


def dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether `first` is nowhere worse than `second` and somewhere better (smaller)."""
    return all(map(float.__le__, first, second)) and any(map(float.__lt__, first, second))


def pareto_front(evaluations: Mapping[_K, Evaluation]) -> list[_K]:
    """Keys of the feasible evaluations that none dominates, in the mapping's order. Of equal ones the first stays."""
    feasible = [(key, _floats(each.objectives)) for key, each in evaluations.items() if each.is_feasible]
    best: dict[Vector, _K] = {}
    for key, objectives in feasible:
        best.setdefault(objectives, key)
    return [key for vector, key in best.items() if not any(dominates(other, vector) for other in best)]


def least_violating(evaluations: Mapping[_K, Evaluation]) -> list[_K]:
    """Keys of the evaluations that miss their constraints by least: the sum over constraints of what is above 0, each
    as a share of the largest miss seen, so that units do not matter (ours). Failed ones are left out; may be empty."""
    usable = {key: each for key, each in evaluations.items() if each.failure is None}
    if not usable:
        return []
    worst: list[float] = [
        max(0.0, *column) for column in zip(*(each.constraints for each in usable.values()), strict=True)
    ]

    def miss(each: Evaluation) -> float:
        return sum(max(0.0, value) / limit for value, limit in zip(each.constraints, worst, strict=True) if limit > 0)

    least = min(map(miss, usable.values()))
    return [key for key, each in usable.items() if miss(each) == least]


@dataclass(frozen=True, slots=True)
class ObjectiveScale:
    """Objectives from `ideal` (0) to `nadir` (1). An objective in which the two are equal says nothing: it is 0."""

    ideal: Vector
    nadir: Vector

    @classmethod
    def of(cls, front: Iterable[Sequence[float]]) -> ObjectiveScale:
        """Best and worst value in each objective over the points of a front. Raises ValueError for no points."""
        columns = list(zip(*front, strict=True))
        if not columns:
            raise ValueError("a scale needs at least one point of a front")
        return cls(tuple(map(min, columns)), tuple(map(max, columns)))

    def scaled(self, objectives: Sequence[float]) -> Vector:
        return tuple(
            (value - low) / (high - low) if high > low else 0.0
            for value, low, high in zip(objectives, self.ideal, self.nadir, strict=True)
        )

    def hypervolume(self, points: Iterable[Sequence[float]]) -> float:
        """Of points given in their own units, against `REFERENCE`."""
        reference = (REFERENCE,) * len(self.ideal)
        return hypervolume([self.scaled(point) for point in points], reference)


def _floats(values: Sequence[float]) -> Vector:
    return tuple(map(float, values))
