"""Points and evaluations as Optuna keeps them: parameters on the finest steps, values, constraints, user attributes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.space import Axis, CategoricalAxis, Key, SearchSpace

DUPLICATE = "duplicate_of"
"""User attribute of a trial that was told the evaluation of an earlier trial of the same point: that trial's number."""
_INFO = "info"


def distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    """The space for `Study.ask` and for samplers: they then draw points on the finest steps only."""
    return {axis.name: _distribution(axis) for axis in space.axes}


def fingerprint(space: SearchSpace) -> str:
    """Equal for equal spaces, whatever process wrote it."""
    return json.dumps([asdict(axis) for axis in space.axes])


def trial_key(space: SearchSpace, trial: FrozenTrial) -> Key | None:
    """None for a trial that has not all parameters of the space, or values outside of it."""
    try:
        return space.key({axis.name: trial.params[axis.name] for axis in space.axes})
    except (KeyError, ValueError):
        return None


def evaluations_in(
    space: SearchSpace, trials: Iterable[FrozenTrial], directions: Sequence[StudyDirection]
) -> dict[Key, Evaluation]:
    """What finished trials say, as things to be made small; by point, in the order of the trials, the first counts. A
    trial that failed with all its parameters set is a failed evaluation: asking again would fail again."""
    found: dict[Key, Evaluation] = {}
    for trial in trials:
        key = trial_key(space, trial)
        if key is not None and trial.state in (TrialState.COMPLETE, TrialState.FAIL):
            found.setdefault(key, _evaluation(trial, directions))
    return found


def info_attributes(evaluation: Evaluation) -> dict[str, Any]:
    """User attributes that keep what Optuna has no place for."""
    return {_INFO: dict(evaluation.info)}


def _evaluation(trial: FrozenTrial, directions: Sequence[StudyDirection]) -> Evaluation:
    info = trial.user_attrs.get(_INFO, {})
    constraints = tuple(value for _, value in sorted(trial.constraints.items()))
    if trial.state == TrialState.FAIL:
        return Evaluation((math.inf,) * len(directions), constraints, info)
    signs = [-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions]
    return Evaluation(tuple(sign * value for sign, value in zip(signs, trial.values, strict=True)), constraints, info)


def _distribution(axis: Axis) -> BaseDistribution:
    if isinstance(axis, CategoricalAxis):
        return CategoricalDistribution(axis.choices)
    low, high = axis.coarse[0], axis.coarse[-1]
    if axis.is_integer:
        return IntDistribution(int(low), int(high), step=int(axis.step))
    return FloatDistribution(low, high, step=axis.step)
