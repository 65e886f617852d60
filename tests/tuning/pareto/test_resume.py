"""A killed search goes on from its storage: nothing told is evaluated again, and the result is the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.tuning.pareto.search_in_a_child import BUDGET, search
from tests.tuning.pareto.small_problems import NAMES, SPACE, limited, smooth
from tuning.job.journal import open_journal
from tuning.pareto.search import run_search
from tuning.pareto.trials import trial_key

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def quiet_optuna() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def killed_search(journal: Path, calls: Path, kill_at: int) -> None:
    command = [sys.executable, "-m", "tests.tuning.pareto.search_in_a_child", str(journal), str(calls), str(kill_at)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode == -signal.SIGKILL


def told(journal: Path) -> set[str]:
    study = optuna.load_study(study_name="cache", storage=open_journal(journal))
    return {str(trial_key(SPACE, trial)) for trial in study.get_trials(states=(TrialState.COMPLETE,))}


def test_killed_twice_it_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    journal = tmp_path / "study.log"
    before: set[str] = set()
    for attempt, kill_at in enumerate((4, 20)):
        calls = tmp_path / f"calls-{attempt}"
        killed_search(journal, calls, kill_at)
        assert before.isdisjoint(calls.read_text().splitlines())
        before = told(journal)
    assert 0 < len(before) < BUDGET

    last_calls = tmp_path / "calls-2"
    resumed = search(journal, last_calls)
    again = last_calls.read_text().splitlines()
    assert len(again) == BUDGET - len(before)
    assert before.isdisjoint(again)

    unbroken = run_search(
        "pareto", SPACE, limited, BUDGET, seed=1, objective_names=NAMES, constraint_names=("ttft", "cost")
    )
    assert resumed.evaluated == unbroken.evaluated
    assert resumed.front == unbroken.front
    assert resumed.skipped == unbroken.skipped


def test_a_finished_search_is_read_and_not_run(tmp_path: Path) -> None:
    first = search(tmp_path / "study.log", tmp_path / "calls")
    second = search(tmp_path / "study.log", tmp_path / "more")
    assert second == first
    assert not (tmp_path / "more").exists()


def test_a_study_of_something_else_is_refused() -> None:
    storage = optuna.storages.InMemoryStorage()
    kept = {"storage": storage, "study_name": "cache", "objective_names": NAMES}
    run_search("pareto", SPACE, smooth, 5, 1, **kept)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"begun with method=pareto, .* another study_name"):
        run_search("random", SPACE, smooth, 5, 1, **kept)  # type: ignore[arg-type]
    smaller = type(SPACE)(SPACE.axes[:1])
    with pytest.raises(ValueError, match="begun with space="):
        run_search("pareto", smaller, smooth, 5, 1, **kept)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="study_name"):
        run_search("pareto", SPACE, smooth, 5, 1, storage=storage, objective_names=NAMES)
