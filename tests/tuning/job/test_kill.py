"""A job that is killed goes on: nothing is evaluated twice, and the front is that of an unbroken one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import psutil
import pyarrow.parquet as pq
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from tests.tuning.job.job_runs import arguments, found_by, make_files, run
from tuning.job.job import CHOSEN, STUDY

ROOT = Path(__file__).resolve().parents[3]
EVALUATIONS = 12


def complete(out: Path) -> list[FrozenTrial]:
    journal = out / "study.journal"
    if not journal.exists():
        return []
    storage = JournalStorage(JournalFileBackend(str(journal)))
    if STUDY not in optuna.get_all_study_names(storage):
        return []
    return optuna.load_study(study_name=STUDY, storage=storage).get_trials(states=(TrialState.COMPLETE,))


def test_killed_in_the_middle_it_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    make_files(tmp_path)
    more = ("--evaluations", str(EVALUATIONS), "--local", "2")
    command = [sys.executable, "-m", "tuning.job", *arguments(tmp_path, *more, out="killed")]
    job = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    workers: list[psutil.Process] = []
    while len(complete(tmp_path / "killed")) < 3:
        assert job.poll() is None, job.communicate()[1]
        workers = psutil.Process(job.pid).children(recursive=True)
        time.sleep(0.1)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    assert job.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(workers, timeout=60)[1]

    before = complete(tmp_path / "killed")
    assert 3 <= len(before) < EVALUATIONS
    status, resumed = run(tmp_path, *more, out="killed")
    assert status == CHOSEN
    after = complete(tmp_path / "killed")
    assert [trial for trial in after if trial.number in {each.number for each in before}] == before
    points = [tuple(sorted(trial.params.items())) for trial in after]
    assert len(points) == len(set(points)) == EVALUATIONS

    status, unbroken = run(tmp_path, *more, out="unbroken")
    assert status == CHOSEN
    assert found_by(resumed) == found_by(unbroken)
    assert pq.read_table(tmp_path / "killed/front.parquet") == pq.read_table(tmp_path / "unbroken/front.parquet")
