"""What the job found, as JSON: for the report, and for programs."""

from __future__ import annotations

from typing import Any

from tuning.deployment.objectives import Goals
from tuning.job.choice import change, extremes
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.result import EvaluatedPoint, SearchResult


def summarise(result: SearchResult, goals: Goals, baseline: EvaluatedPoint | None) -> dict[str, Any]:
    """Counts, the baseline, the extreme points against it, the front, all evaluated points, and those left out with
    the reason. Objectives stand under their names, throughput without its minus sign."""
    front = result.front
    return {
        "counts": {
            "evaluated": len(result.evaluated),
            "on_front": len(front),
            "infeasible": sum(not each.evaluation.is_feasible for each in result.evaluated),
            "failed": len(result.failed),
            "skipped": len(result.skipped),
        },
        "baseline": None if baseline is None else point_of(baseline, goals),
        "extremes": {name: point_of(each, goals, baseline) for name, each in extremes(front).items()} if front else {},
        "front": [point_of(each, goals, baseline) for each in front],
        "evaluated": [point_of(each, goals, baseline) for each in result.evaluated],
        "skipped": [{"point": each.point, "reason": each.reason} for each in result.skipped],
    }


def point_of(each: EvaluatedPoint, goals: Goals, baseline: EvaluatedPoint | None = None) -> dict[str, Any]:
    """A point with its evaluation, and its changes against the baseline as shares of that one."""
    described: dict[str, Any] = {"point": each.point, **evaluation_of(each.evaluation, goals)}
    if baseline is not None and each.evaluation.failure is None and baseline.evaluation.failure is None:
        pairs = zip(each.evaluation.objectives, baseline.evaluation.objectives, strict=True)
        changes = [change(*pair) for pair in pairs]
        described["against_baseline"] = dict(zip(_names(goals), changes, strict=True))
    return described


def evaluation_of(evaluation: Evaluation, goals: Goals) -> dict[str, Any]:
    """Of a failed one only why. `misses` has what is over its limit, by how much."""
    if evaluation.failure is not None:
        return {"feasible": False, "failure": evaluation.failure}
    ttft_s, minus_tokens_per_s, cost = evaluation.objectives
    return {
        "feasible": evaluation.is_feasible,
        "objectives": dict(zip(_names(goals), (ttft_s, -minus_tokens_per_s, cost), strict=True)),
        "misses": misses(evaluation, goals),
        "figures": dict(evaluation.info),
    }


def misses(evaluation: Evaluation, goals: Goals) -> dict[str, float]:
    """By the name of the figure, by how much it is over its limit."""
    return {name: over for name, over in zip(goals.limits, evaluation.constraints, strict=True) if over > 0}


def _names(goals: Goals) -> tuple[str, str, str]:
    return goals.objective_names[0], "tokens_per_s", "cost"
