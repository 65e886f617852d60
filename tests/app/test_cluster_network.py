"""Processes that meet, and those that cannot, on one node: what is found is what would be found of several."""

from __future__ import annotations

import pytest
import ray

from app.cluster_findings import Finding, Meeting, NodeOfCluster
from app.cluster_network import meet
from app.node_probe import GroupMember


def meet_twice(backend: str, limit_s: float) -> Finding:
    """Two processes on the node of these tests."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = {node_id: NodeOfCluster("here", num_cpus=1, num_gpus=0, object_store_bytes=0)}
    return meet(Meeting(backend, (node_id, node_id)), nodes, limit_s)  # type: ignore[arg-type]


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_those_that_meet() -> None:
    assert meet_twice("gloo", 120.0) == Finding("network", "", "ok", "2 nodes reach each other over gloo")


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_where_no_gpu_is_to_be_had_nccl_is_not_tried() -> None:
    """Ray has none in these tests, and says so at once or never."""
    finding = meet_twice("nccl", 5.0)
    assert finding.verdict == "problem"
    assert finding.detail.startswith("nccl was not tried, since not on every node a GPU is free: here: ")


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_what_torch_says_of_a_failure_is_told_with_its_node() -> None:
    finding = meet_twice("no_such_backend", 120.0)
    assert finding.verdict == "problem"
    assert finding.detail.startswith("the nodes do not reach each other over no_such_backend: here: ")
    assert "Look for a firewall between them" in finding.detail


def test_a_member_whose_others_do_not_come_gives_up() -> None:
    member = GroupMember()
    with pytest.raises(RuntimeError):
        member.sum_of_ranks(1, 2, "127.0.0.1:1", "gloo", 1.0)
