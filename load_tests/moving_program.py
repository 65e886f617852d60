"""What the programs that order moves under load have in common: options, load, comparison of answers, report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.answers_alike import Judge, Likeness
from load_tests.client import CompletionClient, first_model
from load_tests.command_line import add_save_options, add_token_ids_option, save, seed_from
from load_tests.measured_run import report_progress
from load_tests.moving_run import Fleet, MovesMade, NotFitError, fleet_of, make_moves
from load_tests.ordered_move import Desk, MovesStuckError
from load_tests.request_record import RequestRecord
from load_tests.run_tables import markdown_table
from load_tests.steady_load import SteadyLoad
from load_tests.workloads import Workload
from migrate.ctl.client import BadRequestError, RefusedError, UnreachableError
from tuning.option_types import above_0, at_least_0

Tables = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MovingResult:
    """One run. `records` and `unmoved` are of the same requests, with moves and without."""

    made: MovesMade
    records: list[RequestRecord]
    unmoved: list[RequestRecord]
    likeness: Likeness

    @property
    def failed(self) -> list[str]:
        """Errors of requests, of either kind."""
        return [record.error for record in (*self.records, *self.unmoved) if record.error is not None]


APPLICATION_ERRORS = (
    ConnectionError, NotFitError, BadRequestError, RefusedError, UnreachableError, MovesStuckError,
)  # fmt: skip
"""Of an application that does not do as it should, or is not one whose moves can be measured."""


def parser_of(module: str, doc: str) -> argparse.ArgumentParser:
    """With the options that all programs have which order moves."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base_url", help="server address without /v1, e.g. http://127.0.0.1:8000")
    parser.add_argument(
        "--model-source",
        default="HuggingFaceTB/SmolLM2-135M-Instruct",
        help="what `model` of the application's configuration says: its modules are moved, and it judges answers "
        "where some are to be judged (default %(default)s)",
    )
    add_token_ids_option(parser)
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is reported")
    parser.add_argument("--move-limit-s", type=above_0, default=120.0, help="for one move (default %(default)s)")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", help="environment variable with the key, if it is set"
    )
    add_save_options(parser)
    return parser


def steady_parser_of(module: str, doc: str) -> argparse.ArgumentParser:
    """With the options of a steady load besides, for `run_program`."""
    parser = parser_of(module, doc)
    parser.add_argument("--in-flight", type=int, default=8, help="requests at a time (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--output-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument(
        "--settle-s", type=at_least_0, default=5.0, help="load before the first move (default %(default)s)"
    )
    parser.add_argument("--dwell-s", type=at_least_0, default=2.0, help="load between moves (default %(default)s)")
    parser.add_argument(
        "--attempts", type=int, default=10, help="tries of a move for which there is no room (default %(default)s)"
    )
    parser.add_argument("--timeout-s", type=above_0, default=300.0, help="for one request (default %(default)s)")
    return parser


async def run_program(
    module: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    moves: Callable[[Fleet, argparse.Namespace], Iterable[Any]],
    report: Callable[[MovingResult, argparse.Namespace], tuple[Tables, dict[str, Any], bool]],
    check: Callable[[argparse.Namespace], None] = lambda _: None,
) -> int:
    """Parses, runs and prints. `check` raises ValueError for options that cannot be; `report` gives tables, figures,
    and whether its own part of the run is as it should be. Returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(given)
    try:
        check(options)
        if options.in_flight < 1 or options.attempts < 1:
            raise ValueError("--in-flight and --attempts must be at least 1")
        shape = Workload("steady", 1, options.prompt_tokens, options.output_tokens)
    except ValueError as error:
        parser.error(str(error))
    seed = seed_from(options)
    report_progress(f"seed {seed}")
    load = SteadyLoad(shape, options.in_flight, seed, range(*options.token_ids))
    try:
        result = await _run(options, load, moves)
    except APPLICATION_ERRORS as error:
        report_progress(str(error))
        return 1
    tables, figures, is_good = report(result, options)
    tables = [("Requests", _requests_table(result)), *tables]
    figures = {
        "seed": seed,
        "likeness": asdict(result.likeness),
        "failed": result.failed,
        "stuck": result.made.stuck,
        "repairs": result.made.repairs,
        **figures,
    }
    passed = is_good and not (result.failed or result.likeness.wrong or result.made.stuck or result.made.repairs)
    figures["passed"] = passed
    if options.save:
        save(options, module, given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return 0 if passed else 1


async def _run(
    options: argparse.Namespace, load: SteadyLoad, moves: Callable[[Fleet, argparse.Namespace], Iterable[Any]]
) -> MovingResult:
    api_key = os.environ.get(options.api_key_env) or None
    model = await first_model(options.base_url, api_key)
    desk = Desk(options.base_url, api_key, options.move_limit_s)
    fleet, made = await fleet_of(desk, options.model_source), MovesMade()

    def client(caches_of: str) -> CompletionClient:
        # Answers with moves may leave wrong KV behind, which answers without moves must not find.
        extra = {"logprobs": 0, "cache_salt": caches_of}
        return CompletionClient(options.base_url, model, api_key=api_key, extra=extra, timeout_s=options.timeout_s)

    async with client("moved") as moving, load.running(moving):
        await asyncio.sleep(options.settle_s)
        ordered = moves(fleet, options)
        await make_moves(desk, fleet, ordered, dwell_s=options.dwell_s, attempts=options.attempts, made=made)
    if made.stuck is None:
        await desk.bring_home()
    report_progress(f"{len(load.requests)} requests once more, without moves")
    async with client("unmoved") as still:
        unmoved = await load.once_more(still)
    answered = [
        place
        for place, pair in enumerate(zip(load.records, unmoved, strict=True))
        if all(record.succeeded for record in pair)
    ]
    likeness = await asyncio.to_thread(
        Judge(options.model_source).likeness,
        [load.prompts[place] for place in answered],
        [load.records[place].tokens for place in answered],
        [unmoved[place].tokens for place in answered],
        [load.requests[place].output_tokens for place in answered],
    )
    return MovingResult(made, load.records, unmoved, likeness)


def _requests_table(result: MovingResult) -> str:
    likeness, moves = result.likeness, result.made.moves
    return markdown_table(
        (
            "requests",
            "failed",
            "answers compared",
            "tokens",
            "parted",
            "close calls",
            "wrong",
            "moves done",
            "refused",
            "failed moves",
        ),
        [
            tuple(
                map(
                    str,
                    (
                        len(result.records),
                        len(result.failed),
                        likeness.answers,
                        likeness.tokens,
                        likeness.parted,
                        likeness.close_calls,
                        len(likeness.wrong),
                        sum(move.is_done for move in moves),
                        sum(move.refused for move in moves),
                        sum(not move.is_done for move in moves),
                    ),
                )
            )
        ],
    )
