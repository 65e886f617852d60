"""What the programs that compare servers share: their options, and the way from these to tables and files.

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from load_tests.command_line import (
    add_load_options,
    add_save_options,
    load_options_from,
    save,
    seed_from,
    workloads_from,
)
from load_tests.comparison import Comparison, compare, ratio_table
from load_tests.ending import exit_on_sigterm
from load_tests.run_tables import cpu_table, median_table, medians
from load_tests.server_process import ServerSpec

Judge = Callable[[Comparison], tuple[str, list[dict[str, Any]]]]
"""What follows from a comparison, as a table and as records."""


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """All of them but the servers."""
    parser.add_argument(
        "--by-worker",
        action="store_true",
        help="report also, of our own servers, what each worker computed and fetched and how evenly that was spread",
    )
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs (default 10)")
    parser.add_argument(
        "--turn-about",
        action="store_true",
        help="every other round in reverse order (A B, B A), for differences of a few percent",
    )
    parser.add_argument("--attempts", type=int, default=3, help="runs at most to get one without foreign load")
    parser.add_argument("--start-limit-s", type=float, default=300.0, help="for a server to be healthy (default 300)")
    add_save_options(parser)
    add_load_options(parser)


def name_and_value(text: str) -> tuple[str, str]:
    """What an option of the form NAME=VALUE gives."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def run_comparison(
    module: str,
    parser: argparse.ArgumentParser,
    arguments_given: Sequence[str],
    specs_from: Callable[[argparse.Namespace], list[ServerSpec]],
    judge: Judge | None = None,
) -> int:
    """Compares the servers that `specs_from` makes of the options (ValueError or OSError: what is wrong with them),
    prints and saves the outcome, and returns the exit code: 1 when a server or a request failed. `judge`: its table
    comes first, its records are saved as "verdicts"."""
    arguments = parser.parse_args(arguments_given)
    try:
        options, workloads = load_options_from(arguments), workloads_from(arguments)
        specs = specs_from(arguments)
        if arguments.rounds < 1 or arguments.attempts < 1:
            raise ValueError("--rounds and --attempts must be at least 1")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    exit_on_sigterm()
    comparison = compare(
        specs,
        workloads,
        rounds=arguments.rounds,
        seed=seed_from(arguments),
        options=options,
        attempts=arguments.attempts,
        start_limit_s=arguments.start_limit_s,
        by_worker=arguments.by_worker,
        turn_about=arguments.turn_about,
    )
    by = ("mode", "workload")
    kept = comparison.kept()
    ratios, ratio_records = ratio_table(comparison)
    tables = [
        ("Ratios", ratios),
        ("Medians", median_table(kept, by)),
        ("CPU time by process, ms per output token", cpu_table(kept, by)),
    ]
    figures: dict[str, Any] = {
        "runs": comparison.rows,
        "medians": medians(kept, by),
        "ratios": ratio_records,
        "failure": comparison.failure,
    }
    if judge is not None:
        verdicts, figures["verdicts"] = judge(comparison)
        tables.insert(0, ("Verdicts", verdicts))
    if arguments.save and comparison.rows:
        save(arguments, module, arguments_given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return comparison.exit_code or int(bool(comparison.failure) or any(row["failed"] for row in comparison.rows))
