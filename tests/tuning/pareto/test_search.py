from __future__ import annotations

import math
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import optuna
import pytest

from tests.tuning.pareto.small_problems import NAMES, SPACE, counting, limited, smooth
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import ObjectiveScale
from tuning.pareto.methods import METHODS
from tuning.pareto.search import run_search
from tuning.pareto.space import CategoricalAxis, NumericAxis, Point, SearchSpace


@pytest.fixture(autouse=True)
def quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_evaluates_each_point_once_within_its_budget(method: str) -> None:
    evaluate, calls = counting(limited)
    result = run_search(method, SPACE, evaluate, 24, 5, objective_names=NAMES, constraint_names=("ttft", "cost"))
    assert len(result.evaluated) == len(calls) == 24
    assert len({SPACE.key(point) for point in calls}) == 24
    assert [each.point for each in result.evaluated] == calls
    for each in result.evaluated:
        assert each.evaluation == limited(each.point)
    assert bool(result.skipped) == (method == "pareto")


@pytest.mark.parametrize("method", ["nsga2", "tpe", "random"])
def test_points_asked_for_again_cost_nothing(method: str) -> None:
    space = SearchSpace((NumericAxis("dram_gib", (0, 512, 2048), 512), NumericAxis("ttl_s", (0, 600), 300)))
    evaluate, calls = counting(smooth)
    result = run_search(method, space, evaluate, 100, 1, objective_names=NAMES)
    assert len(calls) == len(result.evaluated) <= space.num_points
    assert len({space.key(point) for point in calls}) == len(calls)
    assert result.num_duplicates > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_says_everything(method: str) -> None:
    first, second = (run_search(method, SPACE, smooth, 20, 7, objective_names=NAMES) for _ in range(2))
    assert first == second


def test_processes_and_threads_give_the_same_result_as_none() -> None:
    alone = run_search("pareto", SPACE, limited, 40, 1, objective_names=NAMES, constraint_names=("ttft", "cost"))
    with ThreadPoolExecutor(5) as threads:
        assert alone == run_search(
            "pareto", SPACE, limited, 40, 1, objective_names=NAMES, constraint_names=("ttft", "cost"), executor=threads
        )
    with ProcessPoolExecutor(2) as processes:
        assert alone == run_search(
            "pareto",
            SPACE,
            limited,
            40,
            1,
            objective_names=NAMES,
            constraint_names=("ttft", "cost"),
            executor=processes,
        )


@pytest.mark.parametrize("method", ["nsga2", "tpe", "qmc"])
def test_batches_do_not_depend_on_the_executor(method: str) -> None:
    alone = run_search(method, SPACE, smooth, 20, 3, objective_names=NAMES, batch=4)
    with ThreadPoolExecutor(4) as threads:
        assert alone == run_search(method, SPACE, smooth, 20, 3, objective_names=NAMES, batch=4, executor=threads)


def test_the_front_of_a_known_problem() -> None:
    """ZDT1 with two variables: the front is 1 - sqrt(x) at y = 0; below (1.1, 1.1) it dominates 0.1 + 2/3 + 0.11."""
    space = SearchSpace(
        (NumericAxis("x", (0.0, 0.25, 0.5, 0.75, 1.0), 1 / 64), NumericAxis("y", (0.0, 0.5, 1.0), 1 / 32))
    )

    def zdt1(point: Point) -> Evaluation:
        x, y = float(point["x"]), float(point["y"])
        g = 1 + 9 * y
        return Evaluation((x, g * (1 - math.sqrt(x / g))))

    result = run_search("pareto", space, zdt1, 40, 1, objective_names=("f1", "f2"))
    exact = 0.1 + 2 / 3 + 0.11
    curve = result.hypervolume_curve(ObjectiveScale((0.0, 0.0), (1.0, 1.0)))
    assert 0.98 * exact < curve[-1] < exact
    assert all(each.point["y"] == 0.0 for each in result.front)


def test_the_front_of_a_known_problem_with_three_objectives() -> None:
    """DTLZ2: an eighth of the unit sphere, where the third variable is a half: 1.331 less pi / 6."""
    quarters = (0.0, 0.25, 0.5, 0.75, 1.0)
    space = SearchSpace(tuple(NumericAxis(name, quarters, 1 / 32) for name in ("a", "b", "distance")))

    def dtlz2(point: Point) -> Evaluation:
        a, b = (float(point[name]) * math.pi / 2 for name in ("a", "b"))
        radius = 1 + (float(point["distance"]) - 0.5) ** 2
        return Evaluation(
            (radius * math.cos(a) * math.cos(b), radius * math.cos(a) * math.sin(b), radius * math.sin(a))
        )

    result = run_search("pareto", space, dtlz2, 60, 1, objective_names=("f1", "f2", "f3"))
    scale = ObjectiveScale((0.0,) * 3, (1.0,) * 3)
    exact = 1.331 - math.pi / 6
    assert 0.8 * exact < result.hypervolume_curve(scale)[-1] < exact
    chance = run_search("random", space, dtlz2, 60, 1, objective_names=("f1", "f2", "f3"))
    assert result.hypervolume_curve(scale)[-1] > chance.hypervolume_curve(scale)[-1]


def test_the_curve_rises_to_the_hypervolume_of_the_front() -> None:
    result = run_search("pareto", SPACE, limited, 30, 1, objective_names=NAMES, constraint_names=("ttft", "cost"))
    scale = ObjectiveScale.of([each.evaluation.objectives for each in result.front])
    curve = result.hypervolume_curve(scale)
    assert len(curve) == 30
    assert np.all(np.diff(curve) > -1e-12)
    assert curve[-1] == pytest.approx(scale.hypervolume([each.evaluation.objectives for each in result.front]))


def test_known_points_come_first_and_count() -> None:
    fixed = {"dram_gib": 1024, "ttl_s": 2400}
    result = run_search("pareto", SPACE, smooth, 12, 1, objective_names=NAMES, known_points=[fixed, fixed])
    assert result.evaluated[0].point == fixed
    assert len(result.evaluated) == 12


def test_nan_is_a_failed_trial() -> None:
    storage = optuna.storages.InMemoryStorage()

    def broken(point: Point) -> Evaluation:
        return Evaluation((math.nan, 1.0)) if point["dram_gib"] == 0 else smooth(point)

    evaluate, calls = counting(broken)
    result = run_search("pareto", SPACE, evaluate, 20, 1, objective_names=NAMES, storage=storage, study_name="nan")
    assert {each.point["dram_gib"] for each in result.failed} == {0}
    assert len(calls) == 20
    assert not {each.point["dram_gib"] for each in result.front} & {0}
    states = [trial.state for trial in optuna.load_study(study_name="nan", storage=storage).trials]
    assert states.count(optuna.trial.TrialState.FAIL) == len(result.failed)


def test_nothing_feasible_gives_the_closest_point() -> None:
    def hopeless(point: Point) -> Evaluation:
        return Evaluation(smooth(point).objectives, (1e6 - float(point["dram_gib"]),))

    result = run_search("pareto", SPACE, hopeless, 20, 1, objective_names=NAMES, constraint_names=("size",))
    assert result.front == ()
    assert result.closest is not None
    assert result.closest.point["dram_gib"] == 2048
    assert result.closest.evaluation.constraints == (1e6 - 2048,)


def test_an_error_ends_the_search_and_what_was_told_is_kept() -> None:
    storage = optuna.storages.InMemoryStorage()
    told: list[Point] = []

    def broken(point: Point) -> Evaluation:
        if len(told) == 10:
            raise RuntimeError("the trace is gone")
        told.append(point)
        return smooth(point)

    with pytest.raises(RuntimeError, match="the trace is gone"):
        run_search("pareto", SPACE, broken, 20, 1, objective_names=NAMES, storage=storage, study_name="error")
    evaluate, calls = counting(smooth)
    result = run_search("pareto", SPACE, evaluate, 20, 1, objective_names=NAMES, storage=storage, study_name="error")
    assert len(calls) == 10
    assert result == run_search("pareto", SPACE, smooth, 20, 1, objective_names=NAMES)


def test_what_an_evaluation_says_beside_its_objectives_is_kept() -> None:
    result = run_search("pareto", SPACE, smooth, 9, 1, objective_names=NAMES)
    for each in result.evaluated:
        assert each.evaluation.info == smooth(each.point).info


def test_a_bar_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    run_search("pareto", SPACE, smooth, 9, 1, objective_names=NAMES, progress=True)
    assert "9/9" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="budget=0"):
        run_search("pareto", SPACE, smooth, 0, 1, objective_names=NAMES)
    with pytest.raises(ValueError, match="allowed are pareto, nsga2"):
        run_search("hill", SPACE, smooth, 5, 1, objective_names=NAMES)
    with pytest.raises(ValueError, match="2 objectives and 0 constraints; 1 and 0 are named"):
        run_search("pareto", SPACE, smooth, 5, 1, objective_names=("ttft_s",))
    choices = SearchSpace((CategoricalAxis("policy", ("a", "b", "c")),))
    with pytest.raises(ValueError, match="choices alone"):
        run_search("grid", choices, smooth, 2, 1, objective_names=NAMES)
