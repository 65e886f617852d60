"""What is wrong with a cluster, from what its nodes say: cases worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from app.cluster_findings import (
    Finding,
    Meeting,
    Needs,
    NodeOfCluster,
    cluster_findings,
    exit_status,
    meetings,
    node_findings,
)
from app.node_probe import DiskSpeed, NodeFacts, measure_disk

GIB = 1 << 30
NEEDS = Needs(
    num_gpus=2, num_cpus=4, gpu_bytes=80 * GIB, dram_bytes=10 * GIB, disk_limit_bytes=100 * GIB,
    longest_request_bytes=(2 * GIB, 3 * GIB),
)  # fmt: skip
NODE = NodeOfCluster("a", num_cpus=8, num_gpus=2, object_store_bytes=15 * GIB)
FACTS = NodeFacts(
    versions={"python": "3.11.7", "ray": "2.60.0"}, gpu_bytes=(79 * GIB, 80 * GIB), disk=DiskSpeed(2e9, 3e9, 200 * GIB)
)


def of(check: str, findings: list[Finding]) -> Finding:
    (found,) = (finding for finding in findings if finding.check == check)
    return found


def test_a_node_that_has_all() -> None:
    findings = node_findings(NODE, FACTS, NEEDS)
    assert {finding.check: finding.verdict for finding in findings} == {
        "GPUs": "ok", "object store": "ok", "disk": "ok",
    }  # fmt: skip
    assert exit_status(findings) == 0


@pytest.mark.parametrize(
    ("gpus", "verdict", "told"),
    [
        ((80 * GIB,), "problem", "torch sees 1"),
        ((), "problem", "torch sees 0"),
        ((40 * GIB, 80 * GIB), "problem", "40.0 GiB"),
        ((76 * GIB, 80 * GIB), "ok", "76.0 GiB"),
        ((75 * GIB, 80 * GIB), "problem", "75.0 GiB"),
    ],
)
def test_gpus_are_those_that_ray_counts_and_as_large_as_planned(gpus: tuple[int, ...], verdict: str, told: str) -> None:
    finding = of("GPUs", node_findings(NODE, replace(FACTS, gpu_bytes=gpus), NEEDS))
    assert finding.verdict == verdict
    assert told in finding.detail


@pytest.mark.parametrize(("gib", "verdict"), [(12, "problem"), (13, "warning"), (14, "warning"), (15, "ok")])
def test_the_object_store_holds_the_tier_and_one_request_and_should_hold_all(gib: int, verdict: str) -> None:
    finding = of("object store", node_findings(replace(NODE, object_store_bytes=gib * GIB), FACTS, NEEDS))
    assert finding.verdict == verdict
    assert verdict == "ok" or "--object-store-memory" in finding.detail


@pytest.mark.parametrize(
    ("disk", "verdict", "told"),
    [
        (DiskSpeed(2e9, 4.9e8, 200 * GIB), "warning", "reads 490 MB/s"),
        (DiskSpeed(2e9, 5e8, 100 * GIB), "ok", "reads 500 MB/s"),
        (DiskSpeed(2e9, 3e9, 99 * GIB), "warning", "99.0 GiB are free"),
        (None, "problem", "Permission denied"),
    ],
)
def test_the_disk_is_large_and_fast_enough(disk: DiskSpeed | None, verdict: str, told: str) -> None:
    facts = replace(FACTS, disk=disk, disk_failure="/kv: Permission denied")
    finding = of("disk", node_findings(NODE, facts, NEEDS))
    assert finding.verdict == verdict
    assert told in finding.detail


def test_what_is_not_configured_is_not_looked_for() -> None:
    needs = replace(NEEDS, num_gpus=0, dram_bytes=None, disk_limit_bytes=0)
    assert node_findings(replace(NODE, num_gpus=0), replace(FACTS, gpu_bytes=()), needs) == []


def test_all_nodes_together_have_enough_and_equal_versions() -> None:
    nodes = [replace(NODE, num_gpus=1, num_cpus=1), replace(NODE, name="b", num_gpus=0, num_cpus=2)]
    other = replace(FACTS, versions={"python": "3.11.7", "ray": "2.59.0"})
    findings = cluster_findings(nodes, {"a": FACTS, "b": other}, NEEDS)
    assert [(finding.check, finding.verdict, finding.detail) for finding in findings] == [
        ("GPUs", "problem", "2 are needed, 1 are there"),
        ("CPUs", "problem", "4 are needed, 3 are there"),
        ("versions", "problem", "ray differs: 2.59.0 on b; 2.60.0 on a"),
    ]
    assert exit_status(findings) == 1
    assert exit_status(cluster_findings([NODE], {"a": FACTS, "b": FACTS}, NEEDS)) == 0


@pytest.mark.parametrize(
    ("gpus", "needed", "backend", "met", "told"),
    [
        ((1, 0, 8), 2, "nccl", "ac", None),
        ((1, 0, 0), 2, "gloo", "abc", "one node has all GPUs"),
        ((0, 0), 2, "gloo", "ab", "no node has a GPU"),
        ((1, 1), 0, "gloo", "ab", "the configuration asks for no GPU"),
        ((2,), 2, None, "", "no two nodes"),
        ((), 2, None, "", "no two nodes"),
    ],
)
def test_who_is_to_reach_whom_and_what_is_not_tried(
    gpus: tuple[int, ...], needed: int, backend: Literal["nccl", "gloo"] | None, met: str, told: str | None
) -> None:
    nodes = {name: replace(NODE, name=name, num_gpus=count) for name, count in zip("abc", gpus, strict=False)}
    tried, not_tried = meetings(nodes, replace(NEEDS, num_gpus=needed))
    assert tried == ([] if backend is None else [Meeting(backend, tuple(met))])
    assert [(finding.check, finding.verdict) for finding in not_tried] == [("network", "skipped")] * (told is not None)
    assert told is None or told in not_tried[0].detail
    assert exit_status(not_tried) == 0


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    speed = measure_disk(folder, 3 << 20)
    assert min(speed.write_bytes_per_s, speed.read_bytes_per_s, speed.free_bytes) > 0
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        measure_disk(tmp_path / "file", 1 << 20)
