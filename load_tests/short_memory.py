"""How many long requests run at once where the decode worker's memory is short, with all KV at home and with heads of
all layers on the prefill worker.

For each number of requests in flight, that many times --rounds are sent, all with prompts of their own, and it is
counted how many were being decoded at a time, and how many had to begin anew since others needed their blocks. Then the
heads move and the same numbers come again. Against an application in mode static there is only the first half.

    EQUIPOISE_OVERLAY=load_tests/overlays/short-memory-bfloat16.yaml serve run serve_configs/local-balanced.yaml
    python -m load_tests.short_memory http://127.0.0.1:8000 --in-flight 2 3 4 6 --heads 2 --prompt-tokens 2000 \
        --output-tokens 600 --save short-memory

Counters are read over Ray, so this runs where the application runs. Progress goes to stderr; stdout gets a Markdown
table and, as its last line, one JSON object. The exit code is 1 when a request failed or the heads did not move.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from kv.exit_status import status_of
from load_tests.arrivals import closed_loop
from load_tests.client import CompletionClient, first_model
from load_tests.command_line import save, seed_from
from load_tests.measured_run import report_progress, send_all
from load_tests.metrics import summarise
from load_tests.moving_program import APPLICATION_ERRORS, parser_of
from load_tests.moving_run import Fleet, NotFitError, fleet_of
from load_tests.ordered_move import Desk
from load_tests.request_record import RequestRecord
from load_tests.run_tables import markdown_table, number
from load_tests.worker_work import CountersError, ask_work, work_between
from load_tests.workloads import Workload, draw_requests
from migrate.moves import HeadMove
from tuning.option_types import above_0

AT_HOME, HEADS_AWAY = "all at home", "heads away"

Row = dict[str, Any]


def most_at_once(records: Sequence[RequestRecord]) -> int:
    """How many requests were between their first and their last token at the same time."""
    changes = sorted(
        change for record in records if record.chunk_s for change in ((record.chunk_s[0], 1), (record.chunk_s[-1], -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def sustained(rows: Sequence[Row], heads: str) -> int:
    """The most requests that were decoded at once in a run in which none began anew; 0 when there is no such run."""
    return max((row["at_once"] for row in rows if row["heads"] == heads and not row["preemptions"]), default=0)


async def measure(options: argparse.Namespace, seed: int) -> list[Row]:
    """One row for each number of requests in flight, and each place of the heads.

    Raises:
        NotFitError: the heads cannot be moved as asked for, and why.
    """
    api_key = os.environ.get(options.api_key_env) or None
    model = await first_model(options.base_url, api_key)
    desk = Desk(options.base_url, api_key, options.move_limit_s)
    fleet = None if options.static else await fleet_of(desk, options.model_source)
    shape = Workload("long", 1, options.prompt_tokens, options.output_tokens)
    rows: list[Row] = []
    async with CompletionClient(options.base_url, model, api_key=api_key, timeout_s=options.timeout_s) as client:

        async def series(heads: str) -> None:
            for in_flight in options.in_flight:
                rows.append({"heads": heads, **await _run(client, options, shape, in_flight, f"{seed}/{heads}")})
                row = rows[-1]
                report_progress(f"{heads}, {in_flight} in flight: {row['at_once']} at once, {row['preemptions']} anew")

        await series(AT_HOME)
        if fleet is not None:
            made = await desk.make(_heads_of(fleet, options.heads))
            if made.happened is None:
                raise NotFitError(f"the heads do not move: {made.problem}")
            try:
                await series(HEADS_AWAY)
            finally:
                await desk.bring_home()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1, or 2 when the options are wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(given)
    if min(options.in_flight, default=0) < 1 or min(options.rounds, options.heads) < 1:
        parser.error("--in-flight, --rounds and --heads must be at least 1")
    seed = seed_from(options)
    report_progress(f"seed {seed}")
    try:
        rows = asyncio.run(measure(options, seed))
    except (*APPLICATION_ERRORS, CountersError) as error:
        report_progress(str(error))
        return 1
    most_by_heads = {heads: sustained(rows, heads) for heads in _places(rows)}
    figures = {"seed": seed, "runs": rows, "sustained": most_by_heads}
    table = markdown_table(
        ("KV heads", "in flight", "decoded at once", "began anew", "failed", "ITL p50, ms", "ITL p99, ms", "tokens/s"),
        (
            (
                row["heads"],
                *(str(row[name]) for name in ("in_flight", "at_once", "preemptions", "failed")),
                *(number(row[name]) for name in ("itl_p50_ms", "itl_p99_ms", "output_tokens_per_s")),
            )
            for row in rows
        ),
    )
    most = markdown_table(
        ("KV heads", "most at once with none begun anew"),
        ((heads, str(count)) for heads, count in most_by_heads.items()),
    )
    tables = [("Without beginning anew", most), ("Runs", table)]
    if options.save:
        save(options, "load_tests.short_memory", given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return 1 if any(row["failed"] for row in rows) else 0


async def _run(
    client: CompletionClient, options: argparse.Namespace, shape: Workload, in_flight: int, seed: str
) -> Row:
    token_ids = range(*options.token_ids)
    requests = [
        draw_requests(shape, f"{seed}/{in_flight}/{place}", token_ids=token_ids)[0]
        for place in range(in_flight * options.rounds)
    ]
    before = await ask_work(options.ray_address, with_token=True)
    records = await send_all(client, requests, closed_loop(len(requests), in_flight))
    done = work_between(before, await ask_work(options.ray_address, with_token=True))
    preemptions = sum(worker.preemptions for worker in done)
    counted = {"in_flight": in_flight, "at_once": most_at_once(records), "preemptions": preemptions}
    return {**counted, **summarise(records).as_row()}


def _heads_of(fleet: Fleet, heads: int) -> HeadMove:
    """The last heads of all layers of the decode worker's instance, to the other one."""
    decode = [name for name in fleet.workers if name.startswith("decode")]
    prefill = [name for name in fleet.workers if name.startswith("prefill")]
    if not (decode and prefill) or heads >= fleet.num_kv_heads:
        raise NotFitError(
            f"there are {len(decode)} decode and {len(prefill)} prefill workers and {fleet.num_kv_heads} KV heads: "
            "start one of each at least, and move fewer heads than there are"
        )
    moved = tuple(range(fleet.num_kv_heads - heads, fleet.num_kv_heads))
    return HeadMove(decode[0], tuple(range(fleet.num_layers)), moved, decode[0], prefill[0])


def _places(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["heads"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("load_tests.short_memory", __doc__ or "")
    parser.add_argument("--static", action="store_true", help="nothing moves in this application: the first half only")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="requests a place in flight (default %(default)s)")
    parser.add_argument("--heads", type=int, default=1, help="KV heads that move, of each layer (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=3000, help="default %(default)s")
    parser.add_argument("--output-tokens", type=int, default=256, help="default %(default)s")
    parser.add_argument("--ray-address", default="auto", help="of the application's cluster (default %(default)s)")
    parser.add_argument("--timeout-s", type=above_0, default=600.0, help="for one request (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(status_of(main))
