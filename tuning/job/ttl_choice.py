"""Times-to-live by groups for the chosen deployment, where they pay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv.policy.policy_file import PolicySpec
from tuning.deployment.deployment import GIB, Deployment
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.front import dominates
from tuning.simulator.group_roots import root_key
from tuning.trace.formats import PARQUET
from tuning.ttl.comparison import on_the_same_trace, on_the_second_half
from tuning.ttl.fit import FitOptions, fit
from tuning.ttl.live_keys import live_keys
from tuning.ttl.policy import to_policy_spec
from tuning.ttl.report import as_json


@dataclass(frozen=True, slots=True)
class TtlChoice:
    """The policy to serve with, and why."""

    policy: PolicySpec
    reason: str
    report: dict[str, Any] | None
    """Of the groups, as `tuning.ttl.report.as_json` makes it; None where there are none."""


def choose_ttls(
    evaluator: DeploymentEvaluator, deployment: Deployment, uniform: Evaluation, trace_path: Path, trace_format: str
) -> TtlChoice:
    """Group TTLs pay when the simulated deployment is better with them than with its own uniform one (nowhere worse,
    somewhere better), keeps its limits, and TTLs made from the first half of the trace give more hits on the second
    than LRU in a pool of the same size (ours). They are served with when the trace has the live store's keys; else they
    name nothing there.

    Their budget is what the larger tier holds: the disk has what DRAM has, too.

    Args:
        uniform: the deployment's evaluation.
        trace_path, trace_format: where the evaluator's trace is from.
    """
    trace = evaluator.trace
    capacity_bytes = max(deployment.dram_gib, deployment.disk_gib) * GIB
    capacity_blocks = capacity_bytes / (evaluator.model.kv_bytes_per_token * (trace.block_tokens or 1))
    horizon_s = float(trace.arrival_s[-1])
    for nothing, reason in (
        (not trace.has_reuse, "the trace has no block hashes"),
        (capacity_blocks < 1, "there is no room to keep anything"),
        (horizon_s == 0, "all requests come at once"),
    ):
        if nothing:
            return TtlChoice(deployment.policy, f"uniform: {reason}", None)
    options = FitOptions(partial_blocks=evaluator.options.partial_blocks, seed=evaluator.options.seed)
    fitted = fit(trace, capacity_blocks * horizon_s, options)
    if fitted.plan.method == "unlimited":
        return TtlChoice(deployment.policy, "uniform: everything is kept as long as the trace", None)
    keys = live_keys(trace_path, trace, fitted.roots) if trace_format == PARQUET else None
    simulated = to_policy_spec(fitted.plan, [root_key(root) for root in fitted.roots], deployment.eviction)
    grouped = evaluator.evaluate(deployment, simulated)
    second_half = on_the_second_half(trace, fitted.plan.budget_block_s, options)
    report = as_json(trace, fitted, simulated, on_the_same_trace(fitted), second_half)
    if not grouped.is_feasible or not dominates(grouped.objectives, uniform.objectives):
        policy, reason = deployment.policy, "uniform: in the simulation of this deployment group TTLs are no better"
    elif second_half is None or second_half.group_ttl_in_pool <= second_half.lru:
        policy = deployment.policy
        reason = "uniform: group TTLs made from the first half of the trace are no better than LRU on the second"
    elif keys is None:
        policy = deployment.policy
        reason = (
            "uniform: group TTLs are better, but this trace has not the keys of a live store, so that their groups "
            "name nothing there"
        )
    else:
        policy, reason = to_policy_spec(fitted.plan, keys, deployment.eviction), "group: better in every respect"
    return TtlChoice(policy, reason, report)
