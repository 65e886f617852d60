"""From what the nodes of a cluster say of themselves to what of it fits a configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from actors.object_store_room import GIB, room_problem
from app.node_probe import NodeFacts

Verdict: TypeAlias = Literal["ok", "warning", "problem", "skipped"]
"""skipped: it was not checked, and the detail says why."""
SLOW_DISK_BYTES_PER_S: Final = 500e6
"""Slower than this is a disk that turns, or a network: computing a prefix anew is often faster than reading it."""


_USABLE_SHARE: Final = 0.95
"""Of the memory that a GPU is sold with, at least so much is there."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a configuration asks of a cluster; bytes and numbers."""

    num_gpus: float
    num_cpus: float
    gpu_bytes: int
    """Of each GPU, as the plan has it."""
    dram_bytes: int | None
    """Of the store's tier on each node; None: there is no store."""
    disk_limit_bytes: int
    longest_request_bytes: tuple[int, ...]
    """KV of the longest request of each worker."""


@dataclass(frozen=True, slots=True)
class NodeOfCluster:
    """A node as Ray lists it."""

    name: str
    num_cpus: float
    num_gpus: float
    object_store_bytes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found, on one node or (""), on all of them together."""

    check: str
    node: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Meeting:
    """Nodes, by id, that are to reach each other."""

    backend: Literal["nccl", "gloo"]
    node_ids: tuple[str, ...]


def meetings(nodes: Mapping[str, NodeOfCluster], needs: Needs) -> tuple[list[Meeting], list[Finding]]:
    """Who is to reach whom, of nodes by id; and what is not tried. What workers with GPUs have for each other goes over
    NCCL; where that cannot be tried, gloo shows at least that there is a way."""
    if len(nodes) < 2:
        return [], [_skipped("there are no two nodes that could reach each other")]
    with_gpus = tuple(node_id for node_id, node in nodes.items() if node.num_gpus)
    if needs.num_gpus and len(with_gpus) > 1:
        return [Meeting("nccl", with_gpus)], []
    if not needs.num_gpus:
        reason = "the configuration asks for no GPU"
    else:
        reason = "one node has all GPUs" if with_gpus else "no node has a GPU"
    return [Meeting("gloo", tuple(nodes))], [_skipped(f"NCCL was not tried: {reason}")]


def _skipped(detail: str) -> Finding:
    return Finding("network", "", "skipped", detail)


def node_findings(node: NodeOfCluster, facts: NodeFacts, needs: Needs) -> list[Finding]:
    """Of one node by itself."""
    found = [_gpus_of(node, facts, needs)] if node.num_gpus or facts.gpu_bytes else []
    if needs.dram_bytes is not None:
        found.append(_object_store(node, needs.dram_bytes, needs.longest_request_bytes))
    if needs.disk_limit_bytes:
        found.append(_disk(node, facts, needs.disk_limit_bytes))
    return found


def cluster_findings(nodes: Sequence[NodeOfCluster], facts: Mapping[str, NodeFacts], needs: Needs) -> list[Finding]:
    """Of all nodes together; `facts` by name."""
    totals = (
        ("GPUs", needs.num_gpus, sum(n.num_gpus for n in nodes)),
        ("CPUs", needs.num_cpus, sum(n.num_cpus for n in nodes)),
    )
    found = [
        Finding(name, "", "ok" if there >= needed else "problem", f"{needed:g} are needed, {there:g} are there")
        for name, needed, there in totals
        if needed
    ]
    return [*found, *_versions(facts)]


def exit_status(findings: Sequence[Finding]) -> int:
    """1 when there is a problem; a warning is none."""
    return int(any(finding.verdict == "problem" for finding in findings))


def _gpus_of(node: NodeOfCluster, facts: NodeFacts, needs: Needs) -> Finding:
    seen, smallest = len(facts.gpu_bytes), min(facts.gpu_bytes, default=0)
    if seen != node.num_gpus:
        detail = f"Ray counts {node.num_gpus:g}, torch sees {seen}: look at the driver, and at `ray start --num-gpus`"
        return Finding("GPUs", node.name, "problem", detail)
    if smallest < _USABLE_SHARE * needs.gpu_bytes:
        detail = f"the smallest has {smallest / GIB:.1f} GiB, plan.device_memory_gib says {needs.gpu_bytes / GIB:.1f}"
        return Finding("GPUs", node.name, "problem", detail)
    return Finding("GPUs", node.name, "ok", f"{seen} of {smallest / GIB:.1f} GiB or more")


def _object_store(node: NodeOfCluster, dram_bytes: int, longest: Sequence[int]) -> Finding:
    """Nobody knows yet which workers a node will have: with one it must do, with all it should."""
    problem = room_problem(node.object_store_bytes, dram_bytes, [max(longest)])
    if problem is not None:
        return Finding("object store", node.name, "problem", problem)
    warning = room_problem(node.object_store_bytes, dram_bytes, list(longest))
    if warning is not None:
        return Finding("object store", node.name, "warning", f"should all workers come to this node: {warning}")
    return Finding("object store", node.name, "ok", f"{node.object_store_bytes / GIB:.2f} GiB")


def _disk(node: NodeOfCluster, facts: NodeFacts, limit_bytes: int) -> Finding:
    disk = facts.disk
    if disk is None:
        return Finding("disk", node.name, "problem", f"cannot be used: {facts.disk_failure}")
    speeds = f"writes {disk.write_bytes_per_s / 1e6:.0f} MB/s, reads {disk.read_bytes_per_s / 1e6:.0f} MB/s"
    if disk.free_bytes < limit_bytes:
        detail = f"{disk.free_bytes / GIB:.1f} GiB are free, store.disk.limit_gib is {limit_bytes / GIB:g}"
        # What the tier holds from an earlier run counts as used here.
        return Finding("disk", node.name, "warning", f"{detail}, unless the tier holds the rest already; {speeds}")
    if disk.read_bytes_per_s < SLOW_DISK_BYTES_PER_S:
        slow = f"less than {SLOW_DISK_BYTES_PER_S / 1e6:.0f} MB/s: prefixes may be faster to compute than to read"
        return Finding("disk", node.name, "warning", f"{speeds}; {slow}")
    return Finding("disk", node.name, "ok", speeds)


def _versions(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    found = []
    for package in next(iter(facts.values())).versions if facts else ():
        by_version: dict[str, list[str]] = {}
        for name, each in facts.items():
            by_version.setdefault(each.versions.get(package, "not installed"), []).append(name)
        if len(by_version) > 1:
            detail = "; ".join(f"{version} on {', '.join(names)}" for version, names in sorted(by_version.items()))
            found.append(Finding("versions", "", "problem", f"{package} differs: {detail}"))
    return found or [Finding("versions", "", "ok", f"equal on {len(facts)} nodes")]
