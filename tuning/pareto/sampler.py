"""The search as an Optuna sampler."""

from __future__ import annotations

import random
import threading
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from tuning.pareto.planner import Planner, PlannerSettings
from tuning.pareto.space import Key, SearchSpace
from tuning.pareto.trials import distributions, evaluations_in, trial_key

_HANDED_OUT = "pareto:key"
# One for all samplers, so that a sampler can be pickled; held for as long as it takes to choose a point.
_choosing = threading.Lock()


class ParetoSampler(BaseSampler):
    """Samples the axes of `space` as `Planner` asks for them, for studies of several objectives with or without
    constraints (`trial.set_constraint`). Suggest parameters by the axes' names with the distributions of `space`
    (`tuning.pareto.trials.distributions`).

    The points of a round may be asked for at once; results may be told in any order. A trial that asks for more than
    the round has left, or after the planner has nothing more to ask for, gets a point drawn at random among those that
    nobody has asked for yet, as a trial that waited would get none: `num_open` says how many there are to ask for.
    Parameters that are no axes of `space` are drawn at random, too. The plan itself draws nothing: `seed` is for these.
    """

    def __init__(self, space: SearchSpace, settings: PlannerSettings | None = None, *, seed: int | None = None) -> None:
        self._planner = Planner(space, settings)
        self._space = space
        self._distributions = distributions(space)
        self._random = random.Random(seed)
        self._independent = RandomSampler(seed=seed)

    def reseed_rng(self) -> None:
        self._random.seed()
        self._independent.reseed_rng()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        if search_space != self._distributions:
            return {
                name: self._independent.sample_independent(study, trial, name, each)
                for name, each in search_space.items()
            }
        with _choosing:
            key = self._choose(study, trial)
            study._storage.set_trial_system_attr(trial._trial_id, _HANDED_OUT, key)
        return self._space.point(key)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def num_open(self, study: Study) -> int:
        """How many points the current round has left to ask for; 0 while all of them run, and when all is done."""
        return len(self._open(study, study.get_trials(deepcopy=False)))

    def skipped(self, study: Study) -> dict[Key, str]:
        """See `Planner.skipped`."""
        return self._planner.skipped(self._evaluations(study, study.get_trials(deepcopy=False)))

    def _choose(self, study: Study, trial: FrozenTrial) -> Key:
        trials = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        open_points = self._open(study, trials)
        if open_points:
            return open_points[0]
        taken = {self._key(other) for other in trials}
        while True:
            key = tuple(self._random.randrange(axis.num_positions) for axis in self._space.axes)
            if key not in taken or len(taken) >= self._space.num_points:
                return key

    def _open(self, study: Study, trials: list[FrozenTrial]) -> list[Key]:
        running = {self._key(other) for other in trials if other.state == TrialState.RUNNING}
        return [key for key in self._planner.open_points(self._evaluations(study, trials)) if key not in running]

    def _evaluations(self, study: Study, trials: list[FrozenTrial]) -> dict[Key, Any]:
        return evaluations_in(self._space, trials, study.directions)

    def _key(self, trial: FrozenTrial) -> Key | None:
        """Also of a trial that was given its point and has not suggested all its parameters yet."""
        handed_out = trial.system_attrs.get(_HANDED_OUT)
        return trial_key(self._space, trial) if handed_out is None else tuple(handed_out)
