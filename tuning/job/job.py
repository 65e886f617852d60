"""The job from its command line to its exit status."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager

import optuna

from kv.exit_status import stop_printing
from tuning.job.choice import default_rule
from tuning.job.inputs import JobInputs, read_inputs
from tuning.job.journal import open_journal
from tuning.job.local_pool import local_pool
from tuning.job.options import make_parser
from tuning.job.other_goals import judged_anew
from tuning.job.out_folder import taken_folder
from tuning.job.outputs import why_nothing, write_outputs
from tuning.job.ray_executor import ClusterError, RayExecutor, connected
from tuning.job.report_content import RunFacts
from tuning.job.serve_config import application_settings, read_base, serve_config
from tuning.job.unlike_simulated import unlike_simulated
from tuning.pareto.evaluation import Evaluate
from tuning.pareto.result import SearchResult
from tuning.pareto.search import run_search

CHOSEN, NOTHING_FEASIBLE, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
STUDY = "equipoise"
JOURNAL = "study.journal"
_OTHER_GOALS = (
    "the study in {out} was searched for other goals: the {count} points that it evaluated are judged by these, and "
    "none is added. A search for these goals may find better ones: give it another --out"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; the exit status is that of the options' help."""
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    options = make_parser().parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        base = read_base(options.base_config)
        inputs = read_inputs(options)
        settings = application_settings(serve_config(base, inputs.evaluator.fixed, options.nodes, None))
        doubts = unlike_simulated(settings, inputs.evaluator)
        for warning in (*inputs.warnings, *doubts):
            _warn(warning)
        with taken_folder(options.out, inputs.identity) as other_goals:
            begun_s = time.monotonic()
            budget: int = options.evaluations
            if other_goals:
                result = _judged_anew(options, inputs)
                budget = len(result.evaluated)
                doubts = [_OTHER_GOALS.format(out=options.out, count=budget), *doubts]
                _warn(doubts[0])
            else:
                result = _search(options, inputs)
                budget = max(budget, len(result.evaluated))  # an earlier run may have had a larger one
            run = RunFacts(
                budget,
                time.monotonic() - begun_s,
                options.rate_factor,
                arguments,
                datetime.datetime.now().astimezone(),
            )
            rule = options.choose or default_rule(inputs.evaluator.goals)
            said = write_outputs(
                options.out,
                inputs,
                result,
                run,
                rule,
                trace_path=options.trace,
                base=base,
                nodes=options.nodes,
                doubts=doubts,
            )
    except KeyboardInterrupt:
        _warn(f"interrupted: the same command goes on from what is in {options.out}")
        return INTERRUPTED
    except BrokenExecutor:
        _warn("tuning.job: a process of the pool was killed, perhaps for want of memory: give a smaller --local")
        return UNUSABLE
    except (ValueError, OSError, ClusterError) as error:
        _warn(f"tuning.job: {error}")
        return UNUSABLE
    if not result.front:
        _warn(why_nothing(result, inputs))
        return NOTHING_FEASIBLE
    _say(said)
    return CHOSEN


def _judged_anew(options: argparse.Namespace, inputs: JobInputs) -> SearchResult:
    return judged_anew(
        open_journal(options.out / JOURNAL),
        STUDY,
        inputs.space,
        inputs.evaluator.goals,
        method=options.method,
        seed=options.seed,
    )


def _search(options: argparse.Namespace, inputs: JobInputs) -> SearchResult:
    evaluator = inputs.evaluator
    storage = open_journal(options.out / JOURNAL)
    with _executor(options, evaluator) as (executor, evaluate, slots):
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
            batch=slots,
            storage=storage,
            study_name=STUDY,
            progress=not options.no_progress,
        )


@contextmanager
def _executor(options: argparse.Namespace, evaluate: Evaluate) -> Iterator[tuple[Executor, Evaluate, int]]:
    """Where to evaluate, what to submit there, and how many it does at a time."""
    address = options.ray or (None if options.local else os.environ.get("RAY_ADDRESS"))
    if address is None:
        workers = options.local or len(os.sched_getaffinity(0))
        with local_pool(evaluate, workers) as (pool, installed):
            yield pool, installed, workers
        return
    with connected(address):
        executor = RayExecutor(options.ray_cpus)
        try:
            yield executor, evaluate, executor.num_slots
        finally:
            executor.shutdown(cancel_futures=True)


def _say(lines: list[str]) -> None:
    """On standard output, whatever characters it takes, and though nobody reads it: the files are what counts."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print("\n".join(lines).encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        stop_printing()


def _warn(message: str) -> None:
    print(message, file=sys.stderr)
