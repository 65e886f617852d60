"""Hypervolume against evaluations: the search of `tuning.pareto` beside NSGA-II, TPE, QMC, random search and a grid.

Each problem has a uniform reference grid. Objectives are scaled to the ideal and nadir of that grid's front, and the
reference point is 1.1 in each. A figure is the share of the grid's own hypervolume that a method has reached after so
many evaluations of different points (over 1: finer steps than the grid's found more); median over the seeds, and in the
last column the smallest and largest. Problems are analytic ones by name, or any `SearchProblem` as `module:name`.

The last line of standard output is all figures as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Sequence

import optuna

from kv.exit_status import status_of
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.run_tables import markdown_table
from load_tests.storage_like_problems import PROBLEMS, SearchProblem
from tuning.pareto.evaluation import Evaluate, Evaluation
from tuning.pareto.front import ObjectiveScale, pareto_front
from tuning.pareto.methods import METHODS, uniform_grid
from tuning.pareto.search import run_search
from tuning.pareto.space import Key, Point, SearchSpace

_CHECKPOINTS = (10, 20, 30, 40, 60)


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.search_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m load_tests.search_curves --budget 60 --seeds 10",
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), metavar="NAME", help="default: all analytic")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="default: all")
    parser.add_argument("--budget", type=int, default=60, help="evaluations of each search (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, help="searches of each method (default %(default)s)")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.budget < 1 or arguments.seeds < 1:
        parser.error("--budget and --seeds must be at least 1")
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    tables, figures = [], {}
    for name in arguments.problems:
        try:
            problem = find_problem(name)
        except ValueError as error:
            parser.error(str(error))
        report_progress(f"{name}: reference grid")
        curves = compare(problem, arguments.methods, arguments.budget, range(1, arguments.seeds + 1))
        tables.append((name, curve_table(curves, arguments.budget)))
        figures[name] = curves
    if arguments.save:
        save(arguments, "load_tests.search_curves", arguments_given, tables, figures)
    print("\n\n".join(f"{name}\n\n{table}" for name, table in tables))
    print(json.dumps(figures))
    return 0


def find_problem(name: str) -> SearchProblem:
    """One of `PROBLEMS`, or what `module:attribute` names. Raises ValueError when there is none."""
    if name in PROBLEMS:
        return PROBLEMS[name]
    module_name, separator, attribute = name.partition(":")
    try:
        problem = getattr(importlib.import_module(module_name), attribute) if separator else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"problem {name!r}: {error}") from error
    if not isinstance(problem, SearchProblem):
        raise ValueError(f"problem is {name!r}; give one of {', '.join(PROBLEMS)}, or module:name of a SearchProblem")
    return problem


def compare(
    problem: SearchProblem, methods: Sequence[str], budget: int, seeds: Sequence[int]
) -> dict[str, list[list[float]]]:
    """By method, for each seed the hypervolume after each evaluation as a share of the reference grid's. A method that
    has nothing more to ask for keeps its last value. "pareto" and its order don't depend on the seed: it runs once."""
    evaluate = _Remembering(problem.space, problem.evaluate)
    grid = {key: evaluate(problem.space.point(key)) for key in uniform_grid(problem.space, problem.reference_counts)}
    front = [grid[key].objectives for key in pareto_front(grid)]
    scale = ObjectiveScale.of(front)
    whole = scale.hypervolume(front)
    curves: dict[str, list[list[float]]] = {}
    for method in methods:
        curves[method] = []
        for seed in seeds[:1] if method == "pareto" else seeds:
            result = run_search(
                method,
                problem.space,
                evaluate,
                budget,
                seed,
                objective_names=problem.objective_names,
                constraint_names=problem.constraint_names,
            )
            curve = [round(value / whole, 6) for value in result.hypervolume_curve(scale)]
            curves[method].append(curve + curve[-1:] * (budget - len(curve)))
        report_progress(f"{method}: {statistics.median(curve[-1] for curve in curves[method]):.4f}")
    return curves


def curve_table(curves: dict[str, list[list[float]]], budget: int) -> str:
    checkpoints = [*(count for count in _CHECKPOINTS if count < budget), budget]
    rows = []
    for method, runs in curves.items():
        medians = [f"{statistics.median(run[count - 1] for run in runs):.3f}" for count in checkpoints]
        last = [run[-1] for run in runs]
        rows.append((method, str(len(runs)), *medians, f"{min(last):.3f} to {max(last):.3f}"))
    return markdown_table(("method", "runs", *map(str, checkpoints), "at the end"), rows)


class _Remembering:
    """Evaluations are pure, so the methods share them."""

    def __init__(self, space: SearchSpace, evaluate: Evaluate) -> None:
        self._space = space
        self._evaluate = evaluate
        self._known: dict[Key, Evaluation] = {}

    def __call__(self, point: Point) -> Evaluation:
        key = self._space.key(point)
        if key not in self._known:
            self._known[key] = self._evaluate(point)
        return self._known[key]


if __name__ == "__main__":
    sys.exit(status_of(main))
