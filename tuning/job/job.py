"""The job from its command line to its files."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from kv.policy.policy_file import dump
from tuning.job.choice import choose, default_rule
from tuning.job.front_file import write_front
from tuning.job.inputs import JobInputs, describe, read_inputs, take_folder, warn
from tuning.job.local_pool import local_pool
from tuning.job.options import make_parser
from tuning.job.ray_executor import ClusterError, RayExecutor, connected
from tuning.job.serve_config import dump_config, read_base, serve_config
from tuning.job.summary import evaluation_of, misses, point_of, summarise
from tuning.job.ttl_choice import choose_ttls
from tuning.pareto.evaluation import Evaluate
from tuning.pareto.result import EvaluatedPoint, SearchResult
from tuning.pareto.search import run_search

CHOSEN, NOTHING_FEASIBLE, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
STUDY = "equipoise"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; the exit status is that of the options' help."""
    options = make_parser().parse_args(argv)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        base = read_base(options.base_config)
        inputs = read_inputs(options)
        take_folder(options.out, inputs.identity)
        result = _search(options, inputs)
        return _write(options, inputs, result, base)
    except KeyboardInterrupt:
        warn(f"interrupted: the same command goes on from what is in {options.out}")
        return INTERRUPTED
    except (ValueError, OSError, ClusterError) as error:
        warn(f"tuning.job: {error}")
        return UNUSABLE


def _search(options: argparse.Namespace, inputs: JobInputs) -> SearchResult:
    evaluator = inputs.evaluator
    storage = JournalStorage(JournalFileBackend(str(options.out / "study.journal")))
    with _executor(options, evaluator) as (executor, evaluate, workers):
        return run_search(
            options.method,
            inputs.space,
            evaluate,
            options.evaluations,
            options.seed,
            objective_names=evaluator.goals.objective_names,
            constraint_names=tuple(evaluator.goals.limits),
            known_points=() if inputs.baseline is None else (inputs.baseline,),
            executor=executor,
            batch=workers,
            storage=storage,
            study_name=STUDY,
            progress=not options.no_progress,
        )


@contextmanager
def _executor(options: argparse.Namespace, evaluate: Evaluate) -> Iterator[tuple[Executor, Evaluate, int]]:
    """Where to evaluate, what to submit, and how many at a time for a method that leaves it open."""
    address = options.ray or (None if options.local else os.environ.get("RAY_ADDRESS"))
    if address is None:
        workers = options.local or os.cpu_count() or 1
        with local_pool(evaluate, workers) as (pool, installed):
            yield pool, installed, workers
        return
    with connected(address):
        executor = RayExecutor(options.ray_cpus)
        try:
            yield executor, evaluate, executor.num_slots
        finally:
            executor.shutdown(cancel_futures=True)


def _write(options: argparse.Namespace, inputs: JobInputs, result: SearchResult, base: dict[str, Any]) -> int:
    out: Path = options.out
    goals = inputs.evaluator.goals
    write_front(out / "front.parquet", result, goals)
    baseline = next((each for each in result.evaluated if each.point == inputs.baseline), None)
    summary = describe(inputs) | {"method": result.method, "seed": result.seed} | summarise(result, goals, baseline)
    if not result.front:
        summary |= {"chosen": None, "closest": None if result.closest is None else point_of(result.closest, goals)}
        _write_json(out / "summary.json", summary)
        warn(_why_nothing(result, inputs))
        return NOTHING_FEASIBLE
    rule = options.choose or default_rule(goals)
    chosen = choose(result.front, rule)
    deployment = inputs.evaluator.deployment(chosen.point)
    ttls = choose_ttls(inputs.evaluator, deployment, chosen.evaluation, options.trace, inputs.trace_format)
    policy_path = out / "ttl_policy.json"
    policy_path.write_text(dump(ttls.policy), encoding="ascii")
    policy_file = policy_path.resolve() if ttls.policy.groups else None
    config = serve_config(base, deployment, options.nodes, policy_file)
    about = _about(inputs, chosen, rule)
    (out / "serve_config.yaml").write_text(dump_config(config, about), encoding="utf-8")
    summary |= {
        "chosen": point_of(chosen, goals, baseline)
        | {"rule": rule, "cost_per_hour": chosen.evaluation.info["cost_per_hour"]},
        "ttl": {
            "reason": ttls.reason,
            "policy": json.loads(dump(ttls.policy)),
            "report": ttls.report,
            "with_groups": None if ttls.with_groups is None else evaluation_of(ttls.with_groups, goals),
        },
    }
    _write_json(out / "summary.json", summary)
    print("\n".join((*about, f"times-to-live: {ttls.reason}", f"written: {out}/serve_config.yaml")))
    return CHOSEN


def _about(inputs: JobInputs, chosen: EvaluatedPoint, rule: str) -> list[str]:
    evaluator = inputs.evaluator
    ttft_s, minus_tokens_per_s, cost = chosen.evaluation.objectives
    point = ", ".join(f"{name} {value}" for name, value in chosen.point.items())
    return [
        f"{rule} of {evaluator.trace.name} with {evaluator.model.name} on {evaluator.hardware.name}: {point}",
        f"predicted: {evaluator.goals.objective_names[0]} {ttft_s:.4g}, {-minus_tokens_per_s:,.0f} tokens/s, cost "
        f"{cost:.4g} {evaluator.prices.currency} for the trace ({chosen.evaluation.info['cost_per_hour']:.4g} an hour)",
        "model, engine and devices are those of the configuration that this one was made from",
    ]


def _why_nothing(result: SearchResult, inputs: JobInputs) -> str:
    closest = result.closest
    if closest is None:
        return f"no point could be evaluated; the first: {result.evaluated[0].evaluation.failure}"
    goals = inputs.evaluator.goals
    over = ", ".join(
        f"{name} {goals.limits[name] + miss:.4g} is over its limit of {goals.limits[name]:.4g} by {miss:.4g}"
        for name, miss in misses(closest.evaluation, goals).items()
    )
    point = ", ".join(f"{name} {value}" for name, value in closest.point.items())
    return f"none of {len(result.evaluated)} points keeps the limits. The closest is {point}: {over}"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
