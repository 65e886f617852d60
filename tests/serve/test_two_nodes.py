"""The store of an app on several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_cluster import run_tests


@pytest.mark.cluster
def test_two_nodes_in_a_cluster_of_their_own() -> None:
    run_tests(Path(__file__).with_name("app_on_two_nodes.py"), "3 passed")


@pytest.mark.cluster
def test_whether_two_nodes_are_ready() -> None:
    run_tests(Path(__file__).with_name("check_of_two_nodes.py"), "3 passed")
