from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# How long an example takes is the machine's business.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray cluster for the whole session; tests that use it are marked `cluster`.

    Two CPUs, a 600 MiB object store, namespace `equipoise-tests`. Actors ask for `num_cpus=0`.
    """
    import ray

    with pytest.MonkeyPatch.context() as patch:
        # Set before the start: the processes of the cluster inherit them.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_worker_niceness", "0")  # as Ray does it, anything else on the machine goes first
        patch.setenv("RAY_metrics_report_interval_ms", "1000")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT), prepend=":")
        ray.init(
            num_cpus=2,
            object_store_memory=600 * 1024 * 1024,
            include_dashboard=False,
            namespace="equipoise-tests",
            logging_level=logging.ERROR,
        )
        try:
            yield
        finally:
            ray.shutdown()
