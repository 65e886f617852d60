"""Whether nodes reach each other: a small all-reduce between processes, one a node, in the cluster that this process is
connected to. Nothing here waits without a limit: a firewall drops what it does not let through, and says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app import node_probe
from app.cluster_findings import Finding, Meeting, NodeOfCluster

_ANSWER_S = 15.0
"""Beyond the limit that the members themselves keep: to load torch, and to say that nobody came."""


def meet(meeting: Meeting, nodes: Mapping[str, NodeOfCluster], limit_s: float) -> Finding:
    """Ends within about three times the limit. `nodes`: by id."""
    names = [nodes[node_id].name for node_id in meeting.node_ids]
    make = ray.remote(num_cpus=0, num_gpus=1 if meeting.backend == "nccl" else 0)(node_probe.GroupMember)
    on = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in meeting.node_ids]
    members: list[Any] = [make.options(scheduling_strategy=strategy).remote() for strategy in on]
    try:
        addresses, absent = _answers([member.free_address.remote() for member in members], names, limit_s)
        if absent:
            wanted = "a GPU is free" if meeting.backend == "nccl" else "a process can start"
            return _problem(f"{meeting.backend} was not tried, since not on every node {wanted}: {_listed(absent)}")
        calls = [
            member.sum_of_ranks.remote(rank, len(members), addresses[0], meeting.backend, limit_s)
            for rank, member in enumerate(members)
        ]
        totals, absent = _answers(calls, names, limit_s + _ANSWER_S)
    finally:
        for member in members:
            ray.kill(member)
    if absent:
        variable = "NCCL_SOCKET_IFNAME" if meeting.backend == "nccl" else "GLOO_SOCKET_IFNAME"
        return _problem(
            f"the nodes do not reach each other over {meeting.backend}: {_listed(absent)}. Look for a firewall between "
            f"them, and at the network that is taken ({variable})"
        )
    expected = sum(range(len(members)))
    if totals != [expected] * len(members):
        return _problem(f"{meeting.backend} added up ranks to {totals}, not {expected}")
    return Finding("network", "", "ok", f"{len(members)} nodes reach each other over {meeting.backend}")


def first_line(error: Exception) -> str:
    """What an error of a task comes from."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else ''}"


def _answers(calls: list[Any], names: list[str], limit_s: float) -> tuple[list[Any], dict[str, str]]:
    """What the calls give, and by node why some give nothing. Waits for all of them as long as the limit is."""
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=limit_s)
    values, absent = [], {}
    for name, call in zip(names, calls, strict=True):
        if call not in done:
            absent[name] = f"no answer in {limit_s:g} s"
            continue
        try:
            values.append(ray.get(call, timeout=limit_s))
        except (RayError, GetTimeoutError) as error:
            absent[name] = first_line(error)
    return values, absent


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _problem(detail: str) -> Finding:
    return Finding("network", "", "problem", detail)
