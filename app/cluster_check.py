"""Checks whether a running Ray cluster is ready for a configuration, before anything is deployed on it.

    python -m app.cluster_check serve_configs/llama13b.yaml [--address auto] [--json]

On each node: GPUs as Ray and torch see them, the object store against what the configuration plans, the disk tier's
folder (free space, speed), and whether the package can be imported. Over all of them: enough GPUs and CPUs, equal
versions, and whether the nodes reach each other (NCCL between those with GPUs, gloo where there are none; what was not
tried is told too).
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app import node_probe
from app.cluster_findings import (
    Finding,
    Needs,
    NodeOfCluster,
    cluster_findings,
    exit_status,
    meetings,
    node_findings,
)
from app.cluster_network import first_line, meet
from app.node_probe import NodeFacts
from app.plan import plan, read_shape
from app.serve_config import read_serve_config
from app.settings import AppSettings
from app.settings_error import SettingsError
from app.sizing import GIB, SizingError
from kv.exit_status import status_of

_PROBE_LIMIT_S = 300.0
_KNOCK_LIMIT_S = 5.0


def needs_of(settings: AppSettings, config_path: str | None = None) -> Needs:
    """What the settings ask of a cluster. Raises SizingError for what fits nowhere."""
    planned = plan(settings, read_shape(settings.model, config_path))
    roles = [settings.role(role) for role in settings.roles]
    longest = [
        of["longest_context_tokens"] * of["kv_bytes_per_token"]
        for of in planned["roles"].values()
        for _ in range(of["replicas"])
    ]
    return Needs(
        num_gpus=sum(role.replicas * role.num_gpus for role in roles),
        num_cpus=sum(role.replicas * role.num_cpus for role in roles)
        + settings.ingress.replicas * settings.ingress.num_cpus,
        gpu_bytes=int(settings.plan.device_memory_gib * GIB),
        dram_bytes=int(settings.store.dram_gib * GIB) if settings.has_store else None,
        disk_limit_bytes=int(settings.store.disk.limit_gib * GIB) if settings.has_store else 0,
        longest_request_bytes=tuple(longest),
    )


def check_cluster(needs: Needs, disk_folder: str, disk_bytes: int, network_limit_s: float) -> list[Finding]:
    """All findings, on the cluster that this process is connected to."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = {node["NodeID"]: _listed(node) for node in alive}
    folder = disk_folder if needs.disk_limit_bytes else None
    probe = ray.remote(num_cpus=0, max_retries=0)(node_probe.probe_node)
    calls = {id_: _on(probe, id_).remote(folder, disk_bytes) for id_ in nodes}
    facts: dict[str, NodeFacts] = {}
    found: list[Finding] = []
    for id_, call in calls.items():
        node = nodes[id_]
        try:
            facts[id_] = ray.get(call, timeout=_PROBE_LIMIT_S)
        except (RayError, GetTimeoutError) as error:
            found.append(Finding("node", node.name, "problem", first_line(error)))
        else:
            found += node_findings(node, facts[id_], needs)
    found += cluster_findings(list(nodes.values()), {nodes[id_].name: each for id_, each in facts.items()}, needs)
    tried, not_tried = meetings({id_: nodes[id_] for id_ in facts}, needs)
    return [*found, *(meet(meeting, nodes, network_limit_s) for meeting in tried), *not_tried]


def _knock(address: str) -> None:
    """Raises OSError where nobody listens: Ray would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_LIMIT_S).close()


def _on(task: Any, node_id: str) -> Any:
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


def _listed(node: dict[str, Any]) -> NodeOfCluster:
    resources = node["Resources"]
    return NodeOfCluster(
        f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})",
        resources.get("CPU", 0.0),
        resources.get("GPU", 0.0),
        int(resources.get("object_store_memory", 0)),
    )


def _text(findings: Sequence[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    return "\n".join(
        f"{finding.verdict:<8} {finding.check:<{width}}  {finding.node + ': ' if finding.node else ''}{finding.detail}"
        for finding in findings
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ready, 1 not ready, 2 nothing could be checked (the reason is on the error output)."""
    parser = argparse.ArgumentParser(
        prog="python -m app.cluster_check",
        description="Check whether a running Ray cluster is ready for a configuration. Exit status: 0 ready (there may "
        "be warnings), 1 not ready, 2 nothing could be checked.",
        epilog="example: python -m app.cluster_check serve_configs/llama13b.yaml --json",
    )
    parser.add_argument("serve_config", help="file for `serve run` or `serve deploy`, or a RayService's")
    parser.add_argument("--address", default="auto", help="of the cluster; default: the one that this machine is in")
    parser.add_argument("--config", help="the model's config.json, for a model that is not known by name")
    parser.add_argument("--disk-mib", type=int, default=1024, help="to write and read in the disk tier's folder")
    parser.add_argument(
        "--network-limit-s", type=float, default=60.0, help="until nodes that do not reach each other are given up"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    if options.disk_mib < 1:
        parser.error(f"--disk-mib is {options.disk_mib}; it must be 1 or more")
    if not 0 < options.network_limit_s < 3600:
        parser.error(f"--network-limit-s is {options.network_limit_s}; it must be above 0, and below 3600")
    try:
        settings = read_serve_config(options.serve_config).settings
        needs = needs_of(settings, options.config)
    except (SettingsError, SizingError) as error:
        print(f"{options.serve_config}: {error}", file=sys.stderr)
        return 2
    try:
        _knock(options.address)
        ray.init(address=options.address, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"no Ray cluster at {options.address!r}: {error}", file=sys.stderr)
        return 2
    try:
        findings = check_cluster(needs, settings.store.disk.folder, options.disk_mib << 20, options.network_limit_s)
    finally:
        ray.shutdown()
    if options.json:
        print(
            json.dumps({"ready": exit_status(findings) == 0, "findings": [asdict(each) for each in findings]}, indent=2)
        )
    else:
        print(_text(findings))
    return exit_status(findings)


if __name__ == "__main__":
    sys.exit(status_of(main))
