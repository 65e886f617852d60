"""The search on a real trace: beside a uniform grid and other methods, and against a fixed 1024 GiB of DRAM.

The Mooncake conversation trace through Qwen3-8B on A100s, in two cases: one instance that gets about 10 % more than it
can do, and four at about 70 %. The load is what 1024 GiB of DRAM let through when everything waits from the beginning:
the time that this takes, as a share of the time between the first and the last arrival.

- Each method has `--budget` evaluations. Its figure is the hypervolume of its front as a share of that of a uniform
  grid of 200 points: scaled to the ideal and the nadir of the grid's front, reference point 1.1 in each objective.
- Against the fixed configuration: the best throughput, TTFT and cost found, which are three different configurations,
  and the cheapest that is neither slower to the first token nor lets less through.

Throughput and cost are those of the whole trace, from the first arrival to the last token. The last line of standard
output is all figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from kv.exit_status import status_of
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.run_tables import markdown_table
from load_tests.search_curves import compare, curve_table
from load_tests.storage_like_problems import SearchProblem
from tuning.deployment.deployment import Deployment, ServingOptions
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals
from tuning.hardware_profile import read_hardware
from tuning.model_config import read_model_shape
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.methods import METHODS
from tuning.pareto.result import EvaluatedPoint
from tuning.pareto.search import run_search
from tuning.pareto.space import NumericAxis, Point, SearchSpace
from tuning.price_book import read_prices
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace

_BASELINE_DRAM_GIB = 1024
_GRID = (10, 5, 4)
_TTL_STEP_S = 60
_AT_ONCE = 1e6
"""A rate factor at which all requests are there from the beginning."""
_DISK_CLASS = "gp3-2000"
_PAPER = {"best throughput": "+9.3 %", "best TTFT": "-58.3 %", "best cost": "-20.2 %"}


@dataclass(frozen=True, slots=True)
class Case:
    instances: int
    rate_factor: float
    """By which arrivals are faster than in the trace."""


CASES = {"one": Case(1, 0.1767), "four": Case(4, 0.45)}


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.kareto_search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m load_tests.kareto_search --trace conversation_trace.jsonl --budget 60",
    )
    parser.add_argument("--trace", type=Path, required=True, help="mooncake's conversation_trace.jsonl")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, help="default: both")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="default: all")
    parser.add_argument("--budget", type=int, default=60, help="evaluations of each search (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="searches of each other method (default %(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N of the trace, for a quick look")
    parser.add_argument(
        "--remember", type=Path, metavar="FOLDER", help="keep evaluations there, and go on from those that are there"
    )
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.budget < 1 or arguments.seeds < 1:
        parser.error("--budget and --seeds must be at least 1")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    trace, _ = read_trace(arguments.trace)
    if arguments.requests is not None:
        trace = trace.head(arguments.requests)
    tables: list[tuple[str, str]] = []
    figures: dict[str, Any] = {}
    for name in arguments.cases:
        report_progress(f"{name}: {CASES[name]}")
        kept = None if arguments.remember is None else arguments.remember / f"{name}-{len(trace)}.jsonl"
        case_tables, figures[name] = measure(CASES[name], trace, arguments, kept)
        tables += [(f"{name}: {heading}", table) for heading, table in case_tables]
    if arguments.save:
        save(arguments, "load_tests.kareto_search", arguments_given, tables, figures)
    print("\n\n".join(f"{heading}\n\n{table}" for heading, table in tables))
    print(json.dumps(figures))
    return 0


def measure(
    case: Case, trace: Trace, arguments: argparse.Namespace, kept: Path | None
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Tables with their headings, and the figures."""
    evaluator = make_evaluator(case, trace)
    space = make_space(float(evaluator.trace.arrival_s[-1]))
    evaluate = _Remembering(evaluator, kept)
    fixed = Deployment("monolithic", case.instances, dram_gib=_BASELINE_DRAM_GIB)
    baseline = evaluate.of(fixed)
    at_once = replace(evaluator, trace=trace.scaled(_AT_ONCE)).evaluate(fixed)
    problem = SearchProblem(space, evaluate, _GRID, evaluator.goals.objective_names)
    curves = compare(problem, arguments.methods, arguments.budget, range(1, arguments.seeds + 1))
    # Everything is known by now.
    result = run_search("pareto", space, evaluate, arguments.budget, 1, objective_names=evaluator.goals.objective_names)
    best = best_points(result.front, baseline)
    span_s = float(evaluator.trace.arrival_s[-1])
    load = at_once.info["makespan_s"] / span_s
    figures = {
        "case": asdict(case),
        "span_s": span_s,
        "baseline": {"objectives": baseline.objectives, "info": baseline.info, "load": load},
        "curves": curves,
        "evaluations": len(result.evaluated),
        "front": [{"point": each.point, "objectives": each.evaluation.objectives} for each in result.front],
        "best": {name: {"point": each.point, "info": each.evaluation.info} for name, each in best.items()},
    }
    rows = [_row("fixed", {"dram_gib": _BASELINE_DRAM_GIB, "disk_gib": 0}, baseline, baseline)]
    rows += [_row(name, each.point, each.evaluation, baseline) for name, each in best.items()]
    heading = (
        f"against 1024 GiB of DRAM ({case.instances} x A100, arrivals x {case.rate_factor}, {span_s:,.0f} s; load "
        f"{load:.2f})"
    )
    columns = ("configuration", "DRAM GiB", "disk GiB", "TTL s", "TTFT mean s", "tokens/s", "cost", "change", "paper")
    return [
        ("share of the grid's hypervolume", curve_table(curves, arguments.budget)),
        (heading, markdown_table(columns, rows)),
    ], figures


def best_points(front: Sequence[EvaluatedPoint], baseline: Evaluation) -> dict[str, EvaluatedPoint]:
    """By name; the last only where there is one."""
    best = {
        name: min(front, key=lambda each: each.evaluation.objectives[index])
        for name, index in (("best throughput", 1), ("best TTFT", 0), ("best cost", 2))
    }
    no_worse = [
        each for each in front if all(map(float.__le__, each.evaluation.objectives[:2], baseline.objectives[:2]))
    ]
    if no_worse:
        best["cheapest, no worse"] = min(no_worse, key=lambda each: each.evaluation.objectives[2])
    return best


def make_evaluator(case: Case, trace: Trace) -> DeploymentEvaluator:
    return DeploymentEvaluator(
        trace=trace.scaled(case.rate_factor),
        model=read_model_shape("qwen3-8b"),
        hardware=read_hardware("a100-80g"),
        prices=read_prices("aws-us-east-1"),
        fixed=Deployment("monolithic", case.instances, disk_class=_DISK_CLASS),
        options=ServingOptions(partial_blocks="hit"),
        goals=Goals(),
    )


def make_space(span_s: float) -> SearchSpace:
    """DRAM as in the paper, a disk beside it, and times-to-live up to the length of the trace, which is no limit."""
    quarter_s = math.ceil(span_s / 4 / _TTL_STEP_S) * _TTL_STEP_S
    return SearchSpace(
        (
            NumericAxis("dram_gib", (0, 512, 1024, 1536, 2048), 16),
            NumericAxis("disk_gib", (0, 1024, 2048, 3072, 4096), 64),
            NumericAxis("ttl_s", tuple(quarter_s * index for index in range(5)), _TTL_STEP_S),
        )
    )


class _Remembering:
    """Evaluations are pure, so searches share them, and so do points that stand for one deployment."""

    def __init__(self, evaluator: DeploymentEvaluator, path: Path | None) -> None:
        self._evaluator = evaluator
        self._path = path
        self._known: dict[Deployment, Evaluation] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                kept = json.loads(line)
                evaluation = Evaluation(tuple(kept["objectives"]), info=kept["info"])
                self._known[Deployment(**kept["deployment"])] = evaluation

    def __call__(self, point: Point) -> Evaluation:
        return self.of(self._evaluator.deployment(point))

    def of(self, deployment: Deployment) -> Evaluation:
        if deployment not in self._known:
            self._known[deployment] = evaluation = self._evaluator.evaluate(deployment)
            if self._path is not None:
                kept = {"objectives": evaluation.objectives, "info": evaluation.info, "deployment": asdict(deployment)}
                with self._path.open("a") as file:
                    file.write(json.dumps(kept) + "\n")
        return self._known[deployment]


def _row(name: str, point: Point, evaluation: Evaluation, baseline: Evaluation) -> tuple[str, ...]:
    changes = [f"{_change(*pair):+.1%}" for pair in zip(evaluation.objectives, baseline.objectives, strict=True)]
    ttft_s, minus_tokens_per_s, cost = evaluation.objectives
    return (
        name,
        f"{point['dram_gib']:,}",
        f"{point['disk_gib']:,}",
        f"{point['ttl_s']:,}" if "ttl_s" in point else "no limit",
        f"{ttft_s:,.2f}",
        f"{-minus_tokens_per_s:,.1f}",
        f"{cost:,.2f}",
        f"TTFT {changes[0]}, tokens/s {changes[1]}, cost {changes[2]}",
        _PAPER.get(name, ""),
    )


def _change(value: float, before: float) -> float:
    return value / before - 1


if __name__ == "__main__":
    sys.exit(status_of(main))
