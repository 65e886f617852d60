"""An app behind HAProxy (`RAY_SERVE_ENABLE_HA_PROXY`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_cluster import run_tests


@pytest.mark.cluster
def test_an_app_behind_haproxy_in_a_cluster_of_its_own() -> None:
    run_tests(Path(__file__).with_name("app_behind_haproxy.py"), "4 passed")
