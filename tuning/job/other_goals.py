"""A study read with other goals than it was searched for: what was simulated stays, what it is worth is judged anew."""

from __future__ import annotations

import optuna
from optuna.storages import BaseStorage

from tuning.deployment.objectives import Goals, judged
from tuning.job.job_error import JobError
from tuning.pareto.result import EvaluatedPoint, SearchResult
from tuning.pareto.space import SearchSpace
from tuning.pareto.trials import evaluations_in


def judged_anew(
    storage: BaseStorage, study_name: str, space: SearchSpace, goals: Goals, *, method: str, seed: int
) -> SearchResult:
    """All evaluated points of a study under other goals, in the order of asking. Nothing is evaluated or written.

    Which points there are is what the search's own goals made of it, and why others were skipped: so no reasons are
    given here. Points that could not be evaluated stay so.

    Raises:
        JobError: nothing was evaluated yet.
    """
    try:
        study = optuna.load_study(study_name=study_name, storage=storage)
    except KeyError:  # killed before it began
        evaluations = {}
    else:
        evaluations = evaluations_in(space, study.get_trials(deepcopy=False), study.directions)
    if not evaluations:
        raise JobError(
            "the folder's study was begun for other goals, and nothing was evaluated in it that could be judged by "
            "these: give another --out"
        )
    return SearchResult(
        method,
        seed,
        tuple(
            EvaluatedPoint(space.point(key), each if each.failure is not None else judged(each.info, goals))
            for key, each in evaluations.items()
        ),
        skipped=(),
        num_duplicates=0,
    )
