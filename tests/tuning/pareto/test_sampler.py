"""Optuna's own contract for samplers, as far as it applies, and studies driven without `run_search`."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import optuna
import pytest
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import BasicSamplerTestCase, MultiObjectiveSamplerTestCase, RelativeSamplerTestCase
from optuna.trial import Trial, TrialState

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.planner import Planner, first_points
from tuning.pareto.sampler import ParetoSampler
from tuning.pareto.space import CategoricalAxis, Key, NumericAxis, SearchSpace
from tuning.pareto.trials import distributions

SPACE = SearchSpace(
    (
        NumericAxis("dram_gib", (0, 512, 1024, 2048), 64),
        NumericAxis("share", (0.0, 0.5, 1.0), 0.125),
        CategoricalAxis("policy", ("lru", "lfu")),
    )
)


@pytest.fixture(autouse=True)
def quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


class TestContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        return lambda: ParetoSampler(SPACE, seed=1)


def values(trial: Trial) -> tuple[float, float]:
    dram_gib = trial.suggest_int("dram_gib", 0, 2048, step=64)
    share = trial.suggest_float("share", 0.0, 1.0, step=0.125)
    bonus = 0.2 if trial.suggest_categorical("policy", ["lru", "lfu"]) == "lfu" else 0.0
    hits = dram_gib / (dram_gib + 300) * share + bonus
    return hits, dram_gib * 0.01 + share


def asked(study: optuna.Study) -> list[Key]:
    return [SPACE.key(trial.params) for trial in study.trials]


def planned(count: int) -> list[Key]:
    """The first points by the planner alone, from the same objectives (hits are maximised)."""
    planner, known = Planner(SPACE), {}
    while len(known) < count:
        for key in planner.open_points(known)[: count - len(known)]:
            hits, cost = values(optuna.trial.FixedTrial(SPACE.point(key)))  # type: ignore[arg-type]
            known[key] = Evaluation((-hits, cost))
    return list(known)


def test_a_study_asks_for_what_the_planner_asks_for() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE))
    study.optimize(values, n_trials=30)
    assert asked(study) == planned(30)


def test_a_round_can_be_asked_for_at_once() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=(sampler := ParetoSampler(SPACE)))
    assert sampler.num_open(study) == len(first_points(SPACE))
    trials = [study.ask(distributions(SPACE)) for _ in first_points(SPACE)]
    assert asked(study) == list(first_points(SPACE))
    assert sampler.num_open(study) == 0
    for trial in reversed(trials):
        study.tell(trial, values(trial))
    assert sampler.num_open(study) > 0


def test_trials_beyond_the_round_get_points_of_their_own() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE, seed=3))
    for _ in range(3 * len(first_points(SPACE))):
        study.ask(distributions(SPACE))
    assert len(set(asked(study))) == len(study.trials)


def test_threads_never_share_a_point() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE, seed=3))
    study.optimize(values, n_trials=40, n_jobs=4)
    assert len(set(asked(study))) == 40


def test_nan_fails_the_trial_and_the_search_goes_on() -> None:
    def sometimes_nan(trial: Trial) -> tuple[float, float]:
        hits, cost = values(trial)
        return (float("nan") if trial.params["dram_gib"] == 1024 else hits), cost

    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE))
    study.optimize(sometimes_nan, n_trials=30)
    failed = [trial for trial in study.trials if trial.state == TrialState.FAIL]
    assert failed
    assert len(set(asked(study))) == 30


def test_a_pickled_sampler_goes_on_in_the_same_way() -> None:
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE))
    study.optimize(values, n_trials=12)
    study.sampler = pickle.loads(pickle.dumps(study.sampler))
    study.optimize(values, n_trials=12)
    assert asked(study) == planned(24)


def test_constraints_are_taken_from_trials() -> None:
    def limited(trial: Trial) -> tuple[float, float]:
        trial.set_constraint("cost", trial.suggest_int("dram_gib", 0, 2048, step=64) - 1000.0)
        return values(trial)

    study = optuna.create_study(directions=["maximize", "minimize"], sampler=ParetoSampler(SPACE))
    study.optimize(limited, n_trials=60)
    beyond = [trial for trial in study.trials if trial.params["dram_gib"] > 1000]
    assert len(beyond) < 12
    assert max(trial.params["dram_gib"] for trial in study.best_trials) == 960  # the last step within the limit
