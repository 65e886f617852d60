"""The job's files, and what it says at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kv.policy.policy_file import dump as dump_policy
from tuning.job.axis_ends import values_at_ends
from tuning.job.choice import Rule, choose, extremes
from tuning.job.falls_behind import falls_behind
from tuning.job.front_file import write_front
from tuning.job.inputs import JobInputs
from tuning.job.report_content import RULES, RunFacts, baseline_instances, job_report
from tuning.job.serve_config import dump_config, serve_config
from tuning.job.ttl_choice import choose_ttls
from tuning.job.unlike_served import deployment_doubts
from tuning.pareto.result import EvaluatedPoint, SearchResult
from tuning.report.page import html_page
from tuning.report.summary_file import dump as dump_summary
from tuning.report.wording import SENSES, Sense
from tuning.trace.report import counted


def write_outputs(
    out: Path,
    inputs: JobInputs,
    result: SearchResult,
    run: RunFacts,
    rule: Rule,
    *,
    trace_path: Path,
    base: dict[str, Any],
    nodes: int,
    doubts: list[str],
) -> list[str]:
    """Writes all files into `out`; the configuration and the policy only when something keeps the limits, else those of
    an earlier run are removed.

    Args:
        trace_path: the file that the trace is from.
        base: the Serve configuration to start from.
        nodes: over which the store is spread.
        doubts: of the choice, to be said wherever it is: where the configuration differs from what was simulated, and
            where the search was another.

    Returns:
        What to say of the chosen point.

    Raises:
        OSError: a file can't be written.
    """
    write_front(out / "front.parquet", result, inputs.evaluator.goals)
    baseline = next((each for each in result.evaluated if each.point == inputs.baseline), None)
    baseline = None if baseline is None or baseline.evaluation.failure else baseline
    chosen, ttl_report = None, None
    shown = result.closest
    if result.front:
        shown = chosen = choose(result.front, rule)
        deployment = inputs.evaluator.deployment(chosen.point)
        ttls = choose_ttls(inputs.evaluator, deployment, chosen.evaluation, trace_path, inputs.trace_format)
        ttl_report = ttls.report
        policy_path = out / "ttl_policy.json"
        policy_path.write_text(dump_policy(ttls.policy), encoding="ascii")
        has_reuse = inputs.evaluator.trace.has_reuse
        config = serve_config(
            base,
            deployment,
            nodes,
            policy_path.resolve() if ttls.policy.groups else None,
            keeps_store=not has_reuse,
        )
        about = _about(inputs, chosen, rule, nodes)
        unserved = deployment_doubts(deployment, nodes, inputs.evaluator)
        (out / "serve_config.yaml").write_text(dump_config(config, [*about, *doubts, *unserved]), encoding="utf-8")
        said = [f"times-to-live: {ttls.reason}", *values_at_ends(inputs.space, chosen.point, deployment), *unserved]
    else:
        said = []
        for name in ("serve_config.yaml", "ttl_policy.json"):  # of an earlier run: nobody may serve with them any more
            (out / name).unlink(missing_ok=True)
    if shown is not None:
        said += falls_behind(float(inputs.evaluator.trace.arrival_s[-1]), shown.evaluation.info)
    report = job_report(inputs, result, run, rule, chosen, baseline, ttl_report, (*doubts, *said))
    (out / "summary.json").write_text(dump_summary(report), encoding="utf-8")
    # What is no character in the name of a file can't be written as one.
    (out / "report.html").write_text(html_page(report), encoding="utf-8", errors="replace")
    if chosen is None:
        return []
    return [*about, *_gains(result, inputs, baseline), *said, f"written: {out}/serve_config.yaml, {out}/report.html"]


def why_nothing(result: SearchResult, inputs: JobInputs) -> str:
    """What to say when no point keeps the limits: the closest, and by how much it misses."""
    closest = result.closest
    if closest is None:
        return f"no point could be evaluated; the first: {result.evaluated[0].evaluation.failure}"
    limits = inputs.evaluator.goals.limits.items()
    over = ", ".join(
        f"{name} {limit + miss:.4g} is over its limit of {limit:.4g} by {miss:.4g}"
        for (name, limit), miss in zip(limits, closest.evaluation.constraints, strict=True)
        if miss > 0
    )
    return (
        f"none of {len(result.evaluated)} points keeps the limits. The closest is {_shown(closest)}: {over}. Give a "
        "looser limit, or axes that reach farther; the report has all points"
    )


def _about(inputs: JobInputs, chosen: EvaluatedPoint, rule: Rule, nodes: int) -> list[str]:
    evaluator = inputs.evaluator
    ttft_s, minus_tokens_per_s, cost = chosen.evaluation.objectives
    limits = [
        f"{name} {over + limit:.4g} of at most {limit:.4g}"
        for (name, limit), over in zip(evaluator.goals.limits.items(), chosen.evaluation.constraints, strict=True)
    ]
    return [
        f"{evaluator.trace.name} with {evaluator.model.name} on {evaluator.hardware.name}: {RULES[rule]}",
        _shown(chosen),
        f"predicted: {evaluator.goals.objective_names[0]} {ttft_s:.4g}, {-minus_tokens_per_s:,.0f} tokens/s, cost "
        f"{cost:.4g} {evaluator.prices.currency} for the trace ({chosen.evaluation.info['cost_per_hour']:.4g} an hour)",
        *([f"within the limits: {', '.join(limits)}"] if limits else []),
        "model, engine and devices are those of --base-config, or the application's defaults without one",
        f"dram_gib and limit_gib are each node's, for {counted(nodes, 'node')} (--nodes): more would hold as much each",
    ]


def _gains(result: SearchResult, inputs: JobInputs, baseline: EvaluatedPoint | None) -> list[str]:
    """The best in each objective against the baseline."""
    if baseline is None:
        return []
    said = []
    compared_with = f"{inputs.baseline_dram_gib:,} GiB of DRAM"
    if instances := baseline_instances(inputs):
        compared_with += f" and {instances}"
    if not baseline.evaluation.is_feasible:
        compared_with += " (over a limit)"
    for index, (name, each) in enumerate(extremes(result.front).items()):
        # A throughput has a minus sign among the objectives.
        before, value = abs(baseline.evaluation.objectives[index]), abs(each.evaluation.objectives[index])
        said.append(f"best {name}: {_compared(value, before, SENSES[index])} {compared_with}, with {_shown(each)}")
    return said


def _compared(value: float, before: float, sense: Sense) -> str:
    """In words, as a sign leaves its sense to the reader: "20.2% cheaper than"."""
    share = f"{abs(value / before - 1):.1%} " if before else ""
    return "the same as" if value == before or share == "0.0% " else f"{share}{sense.word(value, before)} than"


def _shown(each: EvaluatedPoint) -> str:
    return ", ".join(f"{name} {value}" for name, value in each.point.items())
