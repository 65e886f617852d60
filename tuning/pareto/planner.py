"""Which points to evaluate next: in rounds, each decided by the complete rounds before it and by nothing else.

The order in which results come in, how many are asked for at once and whether the process was restarted in between
therefore make no difference: the same rounds are asked for in the end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tuning.pareto.candidates import Candidate, candidates
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.hypervolume import Vector, added_hypervolume
from tuning.pareto.landscape import Landscape
from tuning.pareto.space import Key, SearchSpace, with_position

_MOST_CORNERS = 8
_MOST_COARSE_LISTED = 2000
_SHOWN_DIGITS = 9


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """`tau`: a coarse step that improves no objective by more than this share of its range on the front is flat.
    `min_added_hypervolume`: points whose best case adds no more to the front's scaled hypervolume (at most 1.21 with
    two objectives, 1.331 with three) are skipped. `round_points`: how many points are decided on together at most;
    more use more processes at once, fewer learn faster. All three are ours. Raises ValueError out of range."""

    tau: float = 0.01
    min_added_hypervolume: float = 1e-4
    round_points: int = 6

    def __post_init__(self) -> None:
        if not 0 <= self.tau < 1 or not 0 <= self.min_added_hypervolume < 1:
            raise ValueError(
                f"tau={self.tau}, min_added_hypervolume={self.min_added_hypervolume}; both must be from 0 to below 1"
            )
        if self.round_points < 1:
            raise ValueError(f"round_points={self.round_points}; it must be at least 1")


class Planner:
    """Asks for a coarse beginning, then round by round for what may add most to the front.

    A function of the evaluations given to it: rounds that were decided before are kept only to save time. Points that
    it didn't ask for itself play no part in its decisions.
    """

    def __init__(self, space: SearchSpace, settings: PlannerSettings | None = None) -> None:
        self.space = space
        self.settings = settings or PlannerSettings()
        self._round = first_points(space)
        self._used: dict[Key, Evaluation] = {}  # of complete rounds, in the order of asking

    def open_points(self, evaluations: Mapping[Key, Evaluation]) -> tuple[Key, ...]:
        """The points of the current round that have no evaluation yet, in the order of their promise. A failed one
        counts as evaluated. Empty when the search has nothing more to ask for."""
        if any(evaluations.get(key) != used for key, used in self._used.items()):
            self._round, self._used = first_points(self.space), {}
        while self._round and all(key in evaluations for key in self._round):
            self._used |= {key: evaluations[key] for key in self._round}
            self._round = self._next_round()
        return tuple(key for key in self._round if key not in evaluations)

    def skipped(self, evaluations: Mapping[Key, Evaluation]) -> dict[Key, str]:
        """What was looked at and not evaluated, with the reason: candidates of the last decision, and the coarse grid
        (when it has no more than 2,000 points)."""
        open_points = self.open_points(evaluations)
        landscape = Landscape(
            self.space, self._used | {key: evaluations[key] for key in self._round if key in evaluations}
        )
        reasons = dict.fromkeys(open_points, "planned, but the budget was spent")
        for each in candidates(landscape, self.settings.tau):
            if each.key in evaluations or each.key in reasons:
                continue
            added = _promise(landscape, each, landscape.front_vectors)
            if each.closed is not None:
                reasons[each.key] = each.closed
            elif added > self.settings.min_added_hypervolume:
                reasons[each.key] = f"the budget was spent; at best {added:.2g} more hypervolume"
            else:
                # A difference of sums: what is left of nothing may be 1e-16.
                reasons[each.key] = f"at best {round(added, _SHOWN_DIGITS):.2g} more hypervolume"
        positions = [axis.coarse_positions for axis in self.space.axes]
        if math.prod(map(len, positions)) <= _MOST_COARSE_LISTED:
            for key in itertools.product(*positions):
                if key not in evaluations:
                    reasons.setdefault(key, "no point of the front leads there")
        return reasons

    def _next_round(self) -> tuple[Key, ...]:
        landscape = Landscape(self.space, self._used)
        possible = [
            each
            for each in candidates(landscape, self.settings.tau)
            if each.closed is None and each.key not in self._used
        ]
        looks = [each for each in possible if each.is_look][: self.settings.round_points]
        rest = [each for each in possible if not each.is_look]
        return tuple(each.key for each in (*looks, *self._most_promising(landscape, looks, rest)))

    def _most_promising(
        self, landscape: Landscape, looks: list[Candidate], possible: list[Candidate]
    ) -> list[Candidate]:
        """Fills a round with those that add most hypervolume at best, each counted beside the ones taken before it.

        What a point adds only shrinks as others are taken, so an old figure is a bound, and the largest is looked at
        again until it stays the largest.
        """
        front = [*landscape.front_vectors, *(each.best_case for each in looks)]
        heap = [(-_promise(landscape, each, front), index, len(looks)) for index, each in enumerate(possible)]
        heapq.heapify(heap)
        taken: list[Candidate] = []
        while heap and len(looks) + len(taken) < self.settings.round_points:
            negative_gain, index, counted = heapq.heappop(heap)
            if -negative_gain <= self.settings.min_added_hypervolume:
                break
            each = possible[index]
            if counted < len(looks) + len(taken):
                gain = _promise(landscape, each, front)
                heapq.heappush(heap, (-gain, index, len(looks) + len(taken)))
            else:
                taken.append(each)
                front.append(each.best_case)
        return taken


def _promise(landscape: Landscape, candidate: Candidate, front: list[Vector]) -> float:
    """The hypervolume that the best case adds. One that is better than the whole front in some objective would lengthen
    the front, and so move the nadir: it counts wherever it is in the other objectives."""
    best = candidate.best_case
    if min(best) < 0.0:
        best = tuple(min(value, 1.0) for value in best)
    return added_hypervolume(best, front, landscape.reference)


def first_points(space: SearchSpace) -> tuple[Key, ...]:
    """The first round, with the first choice of each categorical axis: the corners of the ordered axes and the middle
    of their coarse grid. With more than three ordered axes, of the corners only the lowest, the highest, and each of
    the two with one axis at its other end."""
    numeric = space.numeric
    lowest = (0,) * len(space.axes)
    highest = tuple(axis.num_positions - 1 if index in numeric else 0 for index, axis in enumerate(space.axes))
    middle = tuple(
        axis.coarse_positions[len(axis.coarse_positions) // 2] if index in numeric else 0
        for index, axis in enumerate(space.axes)
    )
    if 2 ** len(numeric) <= _MOST_CORNERS:
        corners = list(itertools.product(*zip(lowest, highest, strict=True)))
    else:
        corners = [lowest, highest]
        corners += [with_position(lowest, axis, highest[axis]) for axis in numeric]
        corners += [with_position(highest, axis, lowest[axis]) for axis in numeric]
    return tuple(dict.fromkeys([*corners, middle]))
