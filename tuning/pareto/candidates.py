"""Points worth a thought: splits of gaps, steps out of what is known, other choices. Each with the best it may give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tuning.pareto.best_case import between, diminishing_step, in_gap, repeated_step
from tuning.pareto.hypervolume import Vector
from tuning.pareto.landscape import Landscape
from tuning.pareto.space import Key, with_position


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point not evaluated yet. `best_case` is scaled like the landscape. A look (beyond a plateau, at a choice never
    tried) is taken whatever its best case; a point with `closed` is not taken, for that reason: it lies on a
    plateau, or will break a constraint."""

    key: Key
    best_case: Vector
    is_look: bool = False
    closed: str | None = None
    is_plateau: bool = False


def candidates(landscape: Landscape, tau: float) -> list[Candidate]:
    """All candidates, one for a key, sorted by key. `tau` is the gain, as a share of an objective's range on the front,
    below which a step counts as flat; coarse steps may also turn out that much better than their best case says, since
    what lies between two coarse points has not been seen."""
    found: dict[Key, Candidate] = {}
    for each in (*_splits(landscape, tau), *_steps(landscape, tau), *_choices(landscape, tau)):
        if each.key not in landscape.evaluations:
            other = found.get(each.key)
            found[each.key] = each if other is None else _merged(other, each)
    return [found[key] for key in sorted(found)]


def _splits(landscape: Landscape, tau: float) -> Iterator[Candidate]:
    """Gaps between neighbours on a line: halved at coarse values while these lie between, then down to single steps."""
    for axis, low, high in landscape.gaps():
        key = _middle(landscape, low, high, axis)
        best = between(landscape, key) if key is not None else None
        if key is None or best is None:
            continue
        if not landscape.space.coarse_between(axis, low[axis], high[axis]):
            yield Candidate(key, best, closed=_infeasible(landscape, key))
        else:
            is_wanted = not landscape.has_feasible and (low in landscape.leads or high in landscape.leads)
            closed = None if is_wanted else _infeasible(landscape, key)
            yield Candidate(key, landscape.improved(best, tau), closed=closed)


def _steps(landscape: Landscape, tau: float) -> Iterator[Candidate]:
    """From each leading point along each axis, up and down: to the first coarse value beyond all that is known."""
    space = landscape.space
    for lead in landscape.leads:
        for axis in space.numeric:
            for direction in (1, -1):
                line = landscape.line(lead, axis)[::direction]
                position = _coarse_beyond(landscape, line[-1], axis, direction)
                if position is None:
                    continue
                key = with_position(lead, axis, position)
                walked = [at for at in line if at[axis] in space.axes[axis].coarse_positions or at == lead]
                gains = [landscape.gain(*step) for step in itertools.pairwise(walked)]
                is_flat = bool(gains) and gains[-1] <= tau
                if is_flat and len(gains) > 1 and gains[-2] <= tau:
                    plateau = _plateau(landscape, axis, gains, tau)
                    yield Candidate(key, landscape.scaled[line[-1]], closed=plateau, is_plateau=True)
                    continue
                best = _unseen(landscape, line[-1], key, axis, tau)
                if best is None:
                    best = landscape.improved(diminishing_step(landscape, line[-1], key, axis), tau)
                yield Candidate(key, best, is_flat and space.is_coarse(key), _infeasible_step(landscape, key))


def _choices(landscape: Landscape, tau: float) -> Iterator[Candidate]:
    """From each leading point, every other choice of each categorical axis. A choice that was never tried is looked at
    from the two leading points that matter most."""
    space = landscape.space
    for axis in sorted(set(range(len(space.axes))) - set(space.numeric)):
        for position in space.axes[axis].coarse_positions:
            tried = any(key[axis] == position for key in landscape.scaled)
            for rank, lead in enumerate(landscape.leads_by_weight):
                key = with_position(lead, axis, position)
                best = _unseen(landscape, lead, key, axis, tau) or landscape.scaled[lead]
                yield Candidate(key, best, not tried and rank < 2, _infeasible_step(landscape, key))


def _unseen(landscape: Landscape, start: Key, key: Key, axis: int, tau: float) -> Vector | None:
    """The best case of a step out of what is known: from the points around `key`, else from the same step elsewhere.
    The farther away that was, up to half the axes' lengths, the more of `tau` is added to what may be hoped for."""
    best = between(landscape, key)
    if best is not None:
        return landscape.improved(best, tau)
    elsewhere = repeated_step(landscape, start, key, axis)
    return elsewhere and landscape.improved(elsewhere[0], tau * min(1.0, 2 * elsewhere[1]))


def _middle(landscape: Landscape, low: Key, high: Key, axis: int) -> Key | None:
    """Where to split a gap: at its middle coarse value, else half-way, and beside these where the evaluation failed.
    None when there is nothing left between."""
    start, end = low[axis], high[axis]
    coarse = landscape.space.coarse_between(axis, start, end)
    halves = [(start + end) // 2, (3 * start + end) // 4, (start + 3 * end) // 4]
    for position in (*coarse[len(coarse) // 2 :], *coarse[: len(coarse) // 2], *halves):
        key = with_position(low, axis, position)
        if start < position < end and key not in landscape.failed:
            return key
    return None


def _coarse_beyond(landscape: Landscape, key: Key, axis: int, direction: int) -> int | None:
    positions = landscape.space.axes[axis].coarse_positions[::direction]
    return next((at for at in positions if (at - key[axis]) * direction > 0), None)


def _infeasible(landscape: Landscape, key: Key) -> str | None:
    """Why `key` is not expected to hold all constraints: along some axis the best case between its neighbours breaks
    one. A feasible neighbour makes the edge of feasibility worth halving; two that break the same constraint close what
    is between them."""
    for axis in landscape.space.numeric:
        bracket = landscape.bracket(key, axis)
        if bracket is None:
            continue
        for index, value in enumerate(in_gap(landscape, landscape.constraints, key, axis)):
            if value > 0:
                name, (low, high) = landscape.space.axes[axis].name, (end[axis] for end in bracket)
                ends = [landscape.space.axes[axis].value(position) for position in (low, high)]
                return f"constraint {index} is broken at {name}={ends[0]} and {ends[1]}, and between them"
    return None


def _infeasible_step(landscape: Landscape, key: Key) -> str | None:
    """The same for a coarse step from a leading point. While nothing is feasible these are what there is to go by."""
    return _infeasible(landscape, key) if landscape.has_feasible else None


def _plateau(landscape: Landscape, axis: int, gains: list[float], tau: float) -> str:
    name = landscape.space.axes[axis].name
    return f"plateau: the last two steps along {name} gain {gains[-2]:.2%} and {gains[-1]:.2%}, tau is {tau:.2%}"


def _merged(first: Candidate, second: Candidate) -> Candidate:
    """A plateau on one line does not close a point to which another line leads; the rest is the point's own."""
    for one, other in ((first, second), (second, first)):
        if one.is_plateau:
            return other
    best = tuple(map(min, first.best_case, second.best_case))
    return Candidate(first.key, best, first.is_look or second.is_look, first.closed)
