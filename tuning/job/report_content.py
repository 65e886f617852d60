"""What the job found, as the report and its summary want it."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import platform
import shlex
from dataclasses import dataclass
from typing import Any, Final

from tuning.deployment.deployment import GIB
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.hardware_profile import HardwareProfile
from tuning.job.choice import Rule
from tuning.job.inputs import JobInputs
from tuning.model_shape import ModelShape
from tuning.pareto.result import EvaluatedPoint, SearchResult
from tuning.pareto.space import Point
from tuning.report.content import (
    Axis,
    Bill,
    Choice,
    Figures,
    HitCurve,
    JobReport,
    LeftOut,
    Objective,
    ReportedPoint,
    ReuseRatios,
    Slo,
    TtlGroup,
    TtlPlanFacts,
)
from tuning.report.facts import HardwareFacts, ModelFacts, PriceFacts, SearchFacts, TraceFacts
from tuning.simulator.corner import simulate_cache
from tuning.trace.reuse import ideal_hits
from tuning.trace.trace import PartialBlocks, Trace

RULES: Final[dict[Rule, str]] = {
    "cheapest": "the cheapest configuration within the limits",
    "fastest": "the configuration within the limits with the shortest time to first token",
    "knee": "the knee of the front: next to the ideal, each objective scaled to its range on the front",
}
_AXES: Final = {
    "dram_gib": ("DRAM", "GiB"),
    "disk_gib": ("disk", "GiB"),
    "disk_class": ("disk class", ""),
    "ttl_s": ("time-to-live", "s"),
    "eviction": ("eviction", ""),
    "monolithic_instances": ("instances", ""),
    "prefill_instances": ("prefill instances", ""),
    "decode_instances": ("decode instances", ""),
}
_STATISTICS: Final = {"mean": "mean", "p99": "99th percentile of the"}
_CURVE_POINTS: Final = 7
_PACKAGES: Final = ("equipoise", "optuna", "ray", "numpy", "scipy")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Of this run of the job."""

    budget: int
    wall_s: float
    rate_factor: float
    arguments: tuple[str, ...]
    created: datetime.datetime
    """With its zone."""


def job_report(
    inputs: JobInputs,
    result: SearchResult,
    run: RunFacts,
    rule: Rule,
    chosen: EvaluatedPoint | None,
    baseline: EvaluatedPoint | None,
    ttl_report: dict[str, Any] | None,
    warnings: tuple[str, ...],
) -> JobReport:
    """Everything that was given and found.

    Args:
        chosen: None where nothing keeps the limits.
        ttl_report: what `tuning.ttl.report.as_json` says of the chosen point's groups, if there are any.
        warnings: of what was found; those of the inputs are added.
    """
    evaluator = inputs.evaluator
    whole = [each for each in result.evaluated if each.evaluation.failure is None]
    front = [each.point for each in result.front]
    trace = evaluator.trace
    return JobReport(
        trace=_trace_facts(trace, run.rate_factor, evaluator.options.partial_blocks),
        model=_model_facts(evaluator.model),
        hardware=_hardware_facts(evaluator.hardware, evaluator.model),
        prices=PriceFacts(
            **{
                name: getattr(evaluator.prices, name)
                for name in ("name", "currency", "as_of", "source", "hours_per_month")
            },
            gpu_hour=evaluator.prices.gpu_price(evaluator.hardware.name),
        ),
        search=SearchFacts(
            result.method, result.seed, run.budget, result.num_duplicates, run.wall_s, _settings(inputs)
        ),
        axes=tuple(Axis(axis.name, *_AXES[axis.name]) for axis in inputs.space.axes),
        objectives=_objectives(evaluator.goals, evaluator.prices.currency),
        slos=_slos(evaluator.goals, evaluator.prices.currency),
        points=tuple(_point(each, evaluator, each.point in front) for each in whole),
        baseline=None if baseline is None else _point(baseline, evaluator, baseline.point in front),
        baseline_title=", ".join(
            filter(None, (f"fixed {inputs.baseline_dram_gib:,} GiB of DRAM", baseline_instances(inputs)))
        ),
        choice=Choice(
            RULES[rule],
            None if chosen is None else whole.index(chosen),
            None if chosen is not None or result.closest is None else whole.index(result.closest),
        ),
        skipped=tuple(LeftOut(each.point, each.reason) for each in result.skipped),
        failed=tuple(LeftOut(each.point, each.evaluation.failure or "") for each in result.failed),
        hit_curve=_hit_curve(trace, evaluator.model, evaluator.options.partial_blocks) if trace.has_reuse else None,
        ttl_plan=None if ttl_report is None else _ttl_plan(ttl_report),
        warnings=(*inputs.warnings, *warnings),
        command=shlex.join(("python", "-m", "tuning.job", *run.arguments)),
        versions={"Python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        created=run.created.isoformat(timespec="seconds"),
    )


def baseline_instances(inputs: JobInputs) -> str:
    """Numbers of instances of the configuration to compare with, where they are searched: "12 instances". Without them
    a gain of fewer devices would pass for one of the cache."""
    names = [axis.name for axis in inputs.space.axes if axis.name.endswith("_instances")]
    return " and ".join(f"{inputs.baseline[name]} {_AXES[name][0]}" for name in names) if inputs.baseline else ""


def _trace_facts(trace: Trace, rate_factor: float, partial_blocks: PartialBlocks) -> TraceFacts:
    return TraceFacts(
        name=trace.name,
        requests=len(trace),
        span_s=float(trace.arrival_s[-1]),
        rate_factor=rate_factor,
        mean_input_tokens=float(trace.input_tokens.mean()),
        mean_output_tokens=float(trace.output_tokens.mean()),
        block_tokens=trace.block_tokens,
        different_blocks=trace.num_ids if trace.has_reuse else None,
        ideal_block_hit_ratio=_ideal_ratio(trace, partial_blocks) if trace.has_reuse else None,
    )


def _model_facts(model: ModelShape) -> ModelFacts:
    return ModelFacts(
        model.name, model.parameters, model.weight_bytes, model.kv_bytes_per_token, model.max_context_tokens
    )


def _hardware_facts(hardware: HardwareProfile, model: ModelShape) -> HardwareFacts:
    measured = hardware.measured_for(model)
    timing = "peak figures times estimated shares"
    if measured is not None:
        errors = [f"{fit.error.mean:.1%}" for fit in (measured.prefill, measured.decode)]
        timing = (
            f"measured on {measured.machine} on {measured.date}; off by {errors[0]} (prefill) and {errors[1]} (decode) "
            "on average"
        )
    return HardwareFacts(
        name=hardware.name,
        memory_bytes=hardware.memory_bytes,
        memory_bytes_per_s=hardware.memory_bytes_per_s,
        flops_per_s=hardware.flops_per_s,
        host_link_bytes_per_s=hardware.host_link_bytes_per_s,
        network_bytes_per_s=hardware.network_bytes_per_s,
        timing=timing,
    )


def _settings(inputs: JobInputs) -> dict[str, str]:
    """What all points have in common: values that no axis opens, and options."""
    evaluator = inputs.evaluator
    fixed = evaluator.fixed
    instances = ("monolithic_instances",) if fixed.mode == "monolithic" else ("prefill_instances", "decode_instances")
    names = [*instances, "dram_gib", "disk_gib", *(["disk_class"] if fixed.disk_class else []), "ttl_s", "eviction"]
    open_names = {axis.name for axis in inputs.space.axes}
    settings: dict[str, str] = {"mode": fixed.mode}
    for name in names:
        if name not in open_names:
            title, unit = _AXES[name]
            value = getattr(fixed, name)
            settings[title] = "no limit" if value is None else f"{value} {unit}".strip()
    return settings | {name: str(value) for name, value in dataclasses.asdict(evaluator.options).items()}


def _objectives(goals: Goals, currency: str) -> tuple[Objective, Objective, Objective]:
    return (
        Objective(goals.objective_names[0], f"{_STATISTICS[goals.ttft]} time to first token", "s", "lower"),
        Objective("tokens_per_s", "throughput", "tokens/s", "higher"),
        Objective("cost", "cost of serving the trace", currency, "lower"),
    )


def _slos(goals: Goals, currency: str) -> tuple[Slo, ...]:
    titles = {
        f"ttft_{goals.slo}_s": (f"{_STATISTICS[goals.slo]} time to first token", "s"),
        f"tpot_{goals.slo}_s": (f"{_STATISTICS[goals.slo]} time for an output token", "s"),
        "cost_per_hour": ("price of an hour", currency),
    }
    return tuple(Slo(name, *titles[name], limit) for name, limit in goals.limits.items())


def _point(each: EvaluatedPoint, evaluator: DeploymentEvaluator, on_front: bool) -> ReportedPoint:
    evaluation, goals = each.evaluation, evaluator.goals
    ttft_s, minus_tokens_per_s, cost = evaluation.objectives
    return ReportedPoint(
        each.point,
        (ttft_s, -minus_tokens_per_s, cost),
        tuple(over + limit for over, limit in zip(evaluation.constraints, goals.limits.values(), strict=True)),
        on_front,
        _bill(each.point, evaluator),
        Figures.of_summary(evaluation.info),
    )


def _bill(point: Point, evaluator: DeploymentEvaluator) -> Bill:
    deployment, prices = evaluator.deployment(point), evaluator.prices
    return Bill(
        deployment.num_instances * prices.gpu_price(evaluator.hardware.name),
        prices.dram_per_hour(deployment.dram_gib),
        prices.disk_per_hour(deployment.disk_class, deployment.disk_gib),
        deployment.num_instances,
    )


def _hit_curve(trace: Trace, model: ModelShape, partial_blocks: PartialBlocks) -> HitCurve:
    """At all blocks of the trace, a half of them, a quarter and so on."""
    capacities = sorted({max(1, trace.num_ids >> index) for index in range(_CURVE_POINTS)})
    block_bytes = model.kv_bytes_per_token * (trace.block_tokens or 0)
    return HitCurve(
        tuple(blocks * block_bytes / GIB for blocks in capacities),
        tuple(simulate_cache(trace, blocks, partial_blocks).block_hit_ratio for blocks in capacities),
        _ideal_ratio(trace, partial_blocks),
        "LRU, all blocks in one pool, service takes no time"
        + ("" if partial_blocks == "hit" else ", last blocks that are not full never hit"),
    )


def _ideal_ratio(trace: Trace, partial_blocks: PartialBlocks) -> float:
    """What a cache that never forgets hits, counted as the simulations count."""
    hits = ideal_hits(trace)
    return hits.ratio if partial_blocks == "hit" else hits.full_block_ratio


def _ttl_plan(report: dict[str, Any]) -> TtlPlanFacts:
    names = [field.name for field in dataclasses.fields(TtlGroup)]
    ratios = ("lru", "uniform_ttl", "group_ttl", "group_ttl_in_pool")
    compared = {"the same trace": report["same_trace"], "second half, TTLs from the first": report["second_half"]}
    return TtlPlanFacts(
        groups=tuple(TtlGroup(**{name: group[name] for name in names}) for group in report["groups"]),
        budget_block_s=report["budget_block_s"],
        method=report["method"],
        uniform_ttl_s=report["uniform_ttl_s"],
        comparisons=tuple(
            ReuseRatios(name, *(found[ratio] for ratio in ratios))
            for name, found in compared.items()
            if found is not None
        ),
    )
