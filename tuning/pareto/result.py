"""What a search found."""

from __future__ import annotations

from dataclasses import dataclass

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import ObjectiveScale, least_violating, pareto_front
from tuning.pareto.space import Value


@dataclass(frozen=True, slots=True)
class EvaluatedPoint:
    point: dict[str, Value]
    evaluation: Evaluation


@dataclass(frozen=True, slots=True)
class SkippedPoint:
    point: dict[str, Value]
    reason: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`evaluated` in the order of asking, each point once, failed ones among them; that order does not depend on how
    many were evaluated at a time. `skipped` is empty for methods that give no reasons."""

    method: str
    seed: int
    evaluated: tuple[EvaluatedPoint, ...]
    skipped: tuple[SkippedPoint, ...]
    num_duplicates: int
    """Points that the method asked for again: answered from memory, not counted."""

    @property
    def front(self) -> tuple[EvaluatedPoint, ...]:
        """Feasible points that no other beats, in the order of asking; of equal ones the first. Empty when nothing is
        feasible: see `closest`."""
        return tuple(self.evaluated[index] for index in pareto_front(self._evaluations()))

    @property
    def closest(self) -> EvaluatedPoint | None:
        """The point that misses its constraints by least (by 0 when something is feasible); None when all failed."""
        nearest = least_violating(self._evaluations())
        return self.evaluated[nearest[0]] if nearest else None

    @property
    def failed(self) -> tuple[EvaluatedPoint, ...]:
        return tuple(each for each in self.evaluated if each.evaluation.failure is not None)

    def hypervolume_curve(self, scale: ObjectiveScale) -> tuple[float, ...]:
        """The front's scaled hypervolume after each evaluation. Take the scale from the front of a reference grid to
        compare methods with each other and with that grid."""
        curve: list[float] = []
        front: list[tuple[float, ...]] = []
        for each in self.evaluated:
            if each.evaluation.is_feasible:
                front.append(each.evaluation.objectives)
            curve.append(scale.hypervolume(front))
        return tuple(curve)

    def _evaluations(self) -> dict[int, Evaluation]:
        return {index: each.evaluation for index, each in enumerate(self.evaluated)}
