"""The ways to search, by name: ours and those that it is to be compared with."""

from __future__ import annotations

import itertools
import math
import random
import warnings

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler

from tuning.pareto.planner import PlannerSettings
from tuning.pareto.sampler import ParetoSampler
from tuning.pareto.space import Key, NumericAxis, SearchSpace

METHODS = ("pareto", "nsga2", "tpe", "qmc", "random", "grid")


def make_sampler(name: str, space: SearchSpace, budget: int, seed: int, settings: PlannerSettings) -> BaseSampler:
    """The sampler of a method. Raises ValueError for an unknown name.

    NSGA-II has a population of a fifth of the budget instead of its 50, which would be random search at 60 evaluations;
    TPE is multivariate; QMC is Sobol's sequence, scrambled. "grid" samples nothing: its points are enqueued.
    """
    if name == "pareto":
        return ParetoSampler(space, settings, seed=seed)
    if name == "nsga2":
        return NSGAIISampler(population_size=max(4, budget // 5), seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if name == "tpe":
            return TPESampler(multivariate=True, seed=seed)
        if name == "qmc":
            return QMCSampler(
                scramble=True, seed=seed, warn_asynchronous_seeding=False, warn_independent_sampling=False
            )
    if name in ("random", "grid"):
        return RandomSampler(seed=seed)
    raise ValueError(f"method is {name!r}; allowed are {', '.join(METHODS)}")


def uniform_grid(space: SearchSpace, counts: tuple[int, ...]) -> list[Key]:
    """Evenly spaced points from end to end of every axis, `counts` of them along each, rounded to the finest steps; one
    point stands in the middle. Raises ValueError for counts that don't fit the axes."""
    if len(counts) != len(space.axes):
        raise ValueError(f"counts={counts}; give one for each of the {len(space.axes)} axes")
    positions = []
    for axis, count in zip(space.axes, counts, strict=True):
        last = axis.num_positions - 1
        if not 1 <= count <= last + 1 or (not isinstance(axis, NumericAxis) and count <= last):
            raise ValueError(f"axis {axis.name!r}: {count} of {last + 1} points; choices can't be left out")
        positions.append(
            [last // 2] if count == 1 < last + 1 else [round(at * last / max(1, count - 1)) for at in range(count)]
        )
    return list(itertools.product(*positions))


def grid_counts(space: SearchSpace, budget: int) -> tuple[int, ...]:
    """The finest even grid within `budget`: all choices, and one more point along the ordered axis that has fewest (the
    first of them) for as long as that fits. Raises ValueError when the choices alone are too many."""
    counts = [1 if isinstance(axis, NumericAxis) else axis.num_positions for axis in space.axes]
    if math.prod(counts) > budget:
        raise ValueError(f"a grid needs {math.prod(counts)} points for the choices alone, the budget is {budget}")
    while True:
        finer = [
            (counts[index], index)
            for index in space.numeric
            if counts[index] < space.axes[index].num_positions
            and math.prod(counts) // counts[index] * (counts[index] + 1) <= budget
        ]
        if not finer:
            return tuple(counts)
        counts[min(finer)[1]] += 1


def shuffled(keys: list[Key], seed: int) -> list[Key]:
    """In an order of its own for each seed: a grid walked row by row would look worse than it is until its end."""
    return random.Random(seed).sample(keys, len(keys))
