"""Evaluations as tasks of a real cluster."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest

from tests.tuning.job.job_runs import found_by, make_files, run
from tuning.job.job import CHOSEN
from tuning.job.ray_executor import ClusterError, RayExecutor

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def test_results_and_errors_come_out_of_futures() -> None:
    with RayExecutor(0.25) as executor:
        assert list(executor.map(operator.floordiv, range(20), [3] * 20)) == [n // 3 for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            executor.submit(operator.floordiv, 1, 0).result()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(operator.floordiv, 1, 1)


def test_tasks_that_no_node_could_run_are_refused() -> None:
    with pytest.raises(ClusterError, match="give a smaller --ray-cpus"):
        RayExecutor(1000)


def test_the_job_finds_the_same_as_in_a_process_of_its_own(tmp_path: Path) -> None:
    make_files(tmp_path)
    status, in_tasks = run(tmp_path, "--ray", "auto", "--ray-cpus", "0.5", out="tasks")
    assert status == CHOSEN
    status, here = run(tmp_path, out="here")
    assert status == CHOSEN
    assert found_by(in_tasks) == found_by(here)
