"""A tuning job on the cluster that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_cluster import run_tests


@pytest.mark.cluster
def test_a_job_beside_the_app_in_a_cluster_of_their_own() -> None:
    run_tests(Path(__file__).with_name("app_beside_a_job.py"), "1 passed")
