"""Lets all workers of an application host for each other in a cycle under load, for minutes.

Each sends something of its instance to the next one, the last one to the first; then each takes it back, and so on
until --duration-s is over. Answers are compared as by `load_tests.moves_under_load`. The application has three workers,
or four (cycle-of-four.yaml):

    EQUIPOISE_OVERLAY=load_tests/overlays/cycle-of-three.yaml serve run serve_configs/local-balanced.yaml

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
request failed, an answer was wrong, a move failed or none was made, a worker had to take lost layers home, or nobody
got a token for --silence-limit-s.

    python -m load_tests.cycle_soak http://127.0.0.1:8000 --duration-s 600 --save cycle-of-three
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kv.exit_status import status_of
from load_tests.driver import clock_s
from load_tests.gaps_around import longest_silence_s
from load_tests.metrics import summarise
from load_tests.moves_there_and_back import Movable, rounds
from load_tests.moving_program import MovingResult, run_program, steady_parser_of
from load_tests.moving_run import Fleet
from load_tests.run_tables import markdown_table, number
from migrate.moves import Move
from tuning.option_types import above_0, at_least_0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1, or 2 when the options are wrong."""
    parser = steady_parser_of("load_tests.cycle_soak", __doc__ or "")
    parser.set_defaults(dwell_s=0.5)
    parser.add_argument(
        "--duration-s", type=at_least_0, default=600.0, help="at least one round is made (default %(default)s)"
    )
    parser.add_argument("--silence-limit-s", type=above_0, default=30.0, help="default %(default)s")

    return asyncio.run(run_program("load_tests.cycle_soak", parser, argv, _moves, _report))


def _moves(fleet: Fleet, options: argparse.Namespace) -> Iterator[Move]:
    """Whole rounds, so that all are home at the end."""
    end_s = clock_s() + options.duration_s
    for out, back in rounds(Movable(fleet.workers, fleet.num_layers, fleet.num_kv_heads)):
        yield from (*out, *back)
        if clock_s() >= end_s:
            return


def _report(result: MovingResult, options: argparse.Namespace) -> tuple[list[tuple[str, str]], dict[str, Any], bool]:
    moves, silence_s = result.made.moves, longest_silence_s(result.records)
    summary = summarise(result.records)
    figures = {
        "moves": [move.as_row() for move in moves],
        "longest_silence_s": round(silence_s, 3),
        "with_moves": summary.as_row(),
    }
    took = sorted(move.made.ended_s - move.made.begun_s for move in moves if move.is_done)
    table = markdown_table(
        ("duration, s", "moves", "longest move, s", "longest silence, s", "repairs", "output tokens/s"),
        [
            (
                number(summary.makespan_s),
                str(len(took)),
                number(took[-1] if took else None),
                number(silence_s),
                str(result.made.repairs),
                number(summary.output_tokens / summary.makespan_s if summary.makespan_s else None),
            )
        ],
    )
    is_good = bool(took) and all(move.is_done for move in moves) and silence_s <= options.silence_limit_s
    return [("The cycle", table)], figures, is_good


if __name__ == "__main__":
    sys.exit(status_of(main))
