"""A search from its first point to its result: asks, evaluates, tells; memory, storage and a bar beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from contextlib import closing

import optuna
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import Trial, TrialState
from tqdm import tqdm

from tuning.pareto.evaluation import Evaluate, Evaluation
from tuning.pareto.methods import grid_counts, make_sampler, shuffled, uniform_grid
from tuning.pareto.planner import PlannerSettings
from tuning.pareto.result import EvaluatedPoint, SearchResult, SkippedPoint
from tuning.pareto.sampler import ParetoSampler
from tuning.pareto.space import Key, Point, SearchSpace
from tuning.pareto.trials import DUPLICATE, distributions, evaluations_in, fingerprint, info_attributes, trial_key

_MOST_DUPLICATES_IN_A_ROW = 1000


def run_search(
    method: str,
    space: SearchSpace,
    evaluate: Evaluate,
    budget: int,
    seed: int,
    *,
    objective_names: Sequence[str],
    constraint_names: Sequence[str] = (),
    known_points: Sequence[Point] = (),
    settings: PlannerSettings | None = None,
    executor: Executor | None = None,
    batch: int = 1,
    storage: BaseStorage | None = None,
    study_name: str | None = None,
    progress: bool = False,
) -> SearchResult:
    """Searches `space` with at most `budget` evaluations of different points.

    Args:
        method: One of `METHODS`.
        evaluate: Called once for each point. When it raises, the search ends with that error; what was told is kept.
        objective_names: For Optuna's dashboard; as many as `evaluate` gives objectives.
        constraint_names: Likewise; as many as it gives constraints.
        known_points: Evaluated first, within the budget: a baseline, the configuration in use.
        executor: Evaluates points at once (`concurrent.futures`); `evaluate` must be fit for it. None: one at a time,
            here. The executor stays the caller's to shut down.
        batch: How many points a method other than "pareto" is asked for at once. "pareto" goes by its rounds, whatever
            the executor, so that the same points come out.
        storage: Where trials are kept; None: in memory. A search that was killed goes on from there: nothing that was
            told is evaluated again, what was under way is. With "pareto" the result is the one of an unbroken run;
            other methods draw their random numbers anew. One process at a time may search in a study.
        study_name: By which to find the study in the storage again. Required with `storage`.
        progress: Whether to show a bar.

    Raises ValueError for a budget below 1, a storage without a name, an unknown method, a study of another space,
    method or number of objectives, and an evaluation that has not the objectives or constraints named.
    """
    if budget < 1 or batch < 1:
        raise ValueError(f"budget={budget}, batch={batch}; both must be at least 1")
    if storage is not None and study_name is None:
        raise ValueError("a search with a storage needs study_name, to be found again")
    sampler = make_sampler(method, space, budget, seed, settings or PlannerSettings())
    study = optuna.create_study(
        storage=storage,
        study_name=study_name,
        sampler=sampler,
        directions=["minimize"] * len(objective_names),
        load_if_exists=True,
    )
    _check_study(study, method, space, objective_names)
    queue = [space.key(point) for point in known_points]
    if method == "grid":
        queue += shuffled(uniform_grid(space, grid_counts(space, budget)), seed)
    search = _Search(study, space, evaluate, tuple(constraint_names), executor)
    with closing(tqdm(total=budget, desc=method, unit="point", disable=not progress)) as bar:
        for _ in search.run(queue, budget, 0 if method == "grid" else batch):
            bar.update(len(search.evaluations) - bar.n)
    return search.result(method, seed)


def _check_study(study: Study, method: str, space: SearchSpace, objective_names: Sequence[str]) -> None:
    """Writes what the study is for, or refuses a study that was begun for something else."""
    asked = {"method": method, "space": fingerprint(space), "objectives": list(objective_names)}
    for name, value in asked.items():
        begun = study.user_attrs.get(name)
        if begun is None and not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            study.set_user_attr(name, value)
        elif begun != value:
            raise ValueError(
                f"study {study.study_name!r} was begun with {name}={begun}, and is asked to go on with {value}; "
                "give another study_name"
            )


class _Search:
    """One study on its way."""

    def __init__(
        self,
        study: Study,
        space: SearchSpace,
        evaluate: Evaluate,
        constraint_names: tuple[str, ...],
        executor: Executor | None,
    ) -> None:
        self._study = study
        self._space = space
        self._evaluate = evaluate
        # Optuna gives constraints back by name: numbers in front keep them in the order of the evaluation.
        self._constraint_keys = [f"{index:02d} {name}" for index, name in enumerate(constraint_names)]
        self._executor = executor
        self._distributions = distributions(space)
        self.evaluations = evaluations_in(space, study.get_trials(deepcopy=False), study.directions)

    def run(self, queue: list[Key], budget: int, batch: int) -> Iterator[None]:
        """First the points in `queue`, then `batch` at a time (a round at a time with "pareto") from the sampler, until
        the budget is spent or there is nothing more to ask for; yields after each result."""
        yield from self._finish(self._interrupted())
        queue = [key for key in dict.fromkeys(queue) if key not in self.evaluations]
        duplicates_in_a_row = 0
        while (left := budget - len(self.evaluations)) > 0:
            wanted = min(left, len(queue) or self._wanted(batch))
            if wanted == 0 or len(self.evaluations) == self._space.num_points:
                return
            trials = [self._ask(queue.pop(0) if queue else None) for _ in range(wanted)]
            before = len(self.evaluations)
            yield from self._finish(trials)
            duplicates_in_a_row = 0 if len(self.evaluations) > before else duplicates_in_a_row + len(trials)
            if duplicates_in_a_row > _MOST_DUPLICATES_IN_A_ROW:
                return

    def result(self, method: str, seed: int) -> SearchResult:
        evaluated = evaluations_in(self._space, self._study.get_trials(deepcopy=False), self._study.directions)
        skipped = self._study.sampler.skipped(self._study) if isinstance(self._study.sampler, ParetoSampler) else {}
        return SearchResult(
            method,
            seed,
            tuple(EvaluatedPoint(self._space.point(key), each) for key, each in evaluated.items()),
            tuple(SkippedPoint(self._space.point(key), reason) for key, reason in skipped.items()),
            sum(DUPLICATE in trial.user_attrs for trial in self._study.get_trials(deepcopy=False)),
        )

    def _wanted(self, batch: int) -> int:
        sampler = self._study.sampler
        return sampler.num_open(self._study) if isinstance(sampler, ParetoSampler) else batch

    def _ask(self, key: Key | None) -> Trial:
        if key is not None:
            self._study.enqueue_trial(self._space.point(key), skip_if_exists=True)
        return self._study.ask(self._distributions)

    def _interrupted(self) -> list[Trial]:
        """Trials that a run before this one asked for and did not tell."""
        whole: list[Trial] = []
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial_key(self._space, trial) is None:  # stopped between being created and being given its point
                self._study.tell(trial.number, state=TrialState.FAIL)
            else:
                whole.append(Trial(self._study, trial._trial_id))
        return whole

    def _finish(self, trials: Sequence[Trial]) -> Iterator[None]:
        """Evaluates the trials' points, each once, and tells every trial as soon as its point is there."""
        by_key: dict[Key, list[Trial]] = {}
        for trial in trials:
            by_key.setdefault(self._space.key(trial.params), []).append(trial)
        for key in [key for key in by_key if key in self.evaluations]:
            self._tell(by_key.pop(key), self.evaluations[key], first=self._number_of(key))
            yield
        for key, evaluation in self._evaluated(list(by_key)):
            self._check(evaluation)
            self.evaluations[key] = evaluation
            self._tell(by_key[key], evaluation, first=by_key[key][0].number)
            yield

    def _evaluated(self, keys: list[Key]) -> Iterator[tuple[Key, Evaluation]]:
        points = {key: self._space.point(key) for key in keys}
        if self._executor is None:
            for key, point in points.items():
                yield key, self._evaluate(point)
            return
        futures: dict[Future[Evaluation], Key] = {
            self._executor.submit(self._evaluate, point): key for key, point in points.items()
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    def _check(self, evaluation: Evaluation) -> None:
        given = (len(evaluation.objectives), len(evaluation.constraints))
        named = (len(self._study.directions), len(self._constraint_keys))
        if given != named:
            raise ValueError(
                f"an evaluation has {given[0]} objectives and {given[1]} constraints; "
                f"{named[0]} and {named[1]} are named"
            )

    def _tell(self, trials: list[Trial], evaluation: Evaluation, first: int) -> None:
        for trial in trials:
            if trial.number != first:
                trial.set_user_attr(DUPLICATE, first)
            for name, value in info_attributes(evaluation).items():
                trial.set_user_attr(name, value)
            if evaluation.failure is not None:
                trial.set_user_attr("failure", evaluation.failure)
                self._study.tell(trial, state=TrialState.FAIL)
                continue
            for key, value in zip(self._constraint_keys, evaluation.constraints, strict=True):
                if key not in trial.constraints:  # a run that was killed may have come so far
                    trial.set_constraint(key, value)
            self._study.tell(trial, evaluation.objectives)

    def _number_of(self, key: Key) -> int:
        return next(
            trial.number
            for trial in self._study.get_trials(deepcopy=False)
            if trial.state.is_finished() and trial_key(self._space, trial) == key
        )
