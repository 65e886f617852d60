"""Sends many requests of mixed lengths, closes some of them early, and looks for what does not come back.

Memory of the server's processes is sampled during the run; its trend over the second half is reported with an interval
(docs/metrics-of-load-tests.md). One second after the last request no KV block may be held by a request any more.

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
request failed other than by being closed here, or when blocks were still held, or could not be counted.

    python -m load_tests.soak http://127.0.0.1:8000 --requests 2000 --memory-of ray:: raylet gcs_server --save soak
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp

from kv.exit_status import status_of
from load_tests.arrivals import closed_loop
from load_tests.block_counts import BlocksAtEnd, wait_until_free
from load_tests.client import AbortPoint, CompletionClient, first_model
from load_tests.command_line import add_save_options, save, seed_from
from load_tests.driver import drive
from load_tests.measured_run import report_progress
from load_tests.memory_samples import MemoryGrowth, MemoryMeter, growth
from load_tests.metrics import Summary, summarise
from load_tests.processes import ServerProcesses
from load_tests.request_record import RequestRecord
from load_tests.run_tables import markdown_table, number
from load_tests.trend import Trend
from load_tests.workloads import DEFAULT_TOKEN_IDS, PlannedRequest

_PROGRESS_EVERY = 100
_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class SoakPlan:
    """What to send. Lengths are (shortest, longest) and drawn evenly on a logarithmic scale."""

    requests: int = 2000
    in_flight: int = 16
    prompt_tokens: tuple[int, int] = (16, 1024)
    output_tokens: tuple[int, int] = (1, 128)
    abort_share: float = 0.1
    abort_within_s: float = 2.0
    """A request that is closed before its first token is closed so long after sending at most."""

    def __post_init__(self) -> None:
        if self.requests < 1 or self.in_flight < 1:
            raise ValueError(f"{self.requests} requests, {self.in_flight} in flight: both must be at least 1")
        for name, (shortest, longest) in (("prompt", self.prompt_tokens), ("output", self.output_tokens)):
            if not 1 <= shortest <= longest:
                raise ValueError(f"{name} lengths from {shortest} to {longest}: need 1 <= shortest <= longest")
        if not 0 <= self.abort_share <= 1:
            raise ValueError(f"the share of aborted requests is {self.abort_share}, must be within 0 and 1")


@dataclasses.dataclass(frozen=True, slots=True)
class SoakResult:
    summary: Summary
    memory: dict[str, MemoryGrowth]
    blocks: BlocksAtEnd | None
    blocks_error: str | None

    @property
    def passed(self) -> bool:
        blocks_free = self.blocks is None or self.blocks.all_free
        return self.summary.failed == 0 and blocks_free and self.blocks_error is None


def draw_soak(
    plan: SoakPlan, seed: int, token_ids: range = DEFAULT_TOKEN_IDS
) -> list[tuple[PlannedRequest, AbortPoint | None]]:
    """The requests of a plan and where each is closed early, the same for the same seed.

    One half of those are closed after a random time, which mostly finds them waiting or in prefill; the other half on a
    random chunk.
    """
    rng = random.Random(f"soak/{seed}")

    def length(shortest: int, longest: int) -> int:
        return min(longest, max(shortest, round(math.exp(rng.uniform(math.log(shortest), math.log(longest))))))

    drawn: list[tuple[PlannedRequest, AbortPoint | None]] = []
    for _ in range(plan.requests):
        prompt = tuple(rng.choices(token_ids, k=length(*plan.prompt_tokens)))
        request = PlannedRequest(prompt, len(prompt), length(*plan.output_tokens))
        abort: AbortPoint | None = None
        if rng.random() < plan.abort_share:
            if rng.random() < 0.5:
                abort = AbortPoint(after_s=rng.uniform(0.0, plan.abort_within_s))
            else:
                abort = AbortPoint(after_chunks=rng.randint(1, request.output_tokens))
        drawn.append((request, abort))
    return drawn


async def soak(
    client: CompletionClient,
    plan: SoakPlan,
    seed: int,
    *,
    server: ServerProcesses,
    sample_every_s: float = 5.0,
    blocks_url: str | None = None,
    settle_s: float = 1.0,
) -> SoakResult:
    """Runs the plan. Without `blocks_url` blocks are not looked at."""
    drawn = draw_soak(plan, seed)
    bodies = [client.encode(request) for request, _ in drawn]
    ended = 0

    async def send(index: int, scheduled_s: float) -> RequestRecord:
        nonlocal ended
        request, abort = drawn[index]
        record = await client.send(
            bodies[index], wanted_output_tokens=request.output_tokens, scheduled_s=scheduled_s, abort=abort
        )
        ended += 1
        if ended % _PROGRESS_EVERY == 0:
            report_progress(f"{ended} of {plan.requests} requests")
        return record

    with MemoryMeter(server, sample_every_s) as memory:
        records = await drive(closed_loop(plan.requests, plan.in_flight), send)
    blocks: BlocksAtEnd | None = None
    blocks_error: str | None = None
    if blocks_url is not None:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0)) as session:
                blocks = await wait_until_free(session, blocks_url, settle_s)
        except ValueError as error:
            blocks_error = str(error)
    trends = {label: growth(samples) for label, samples in sorted(memory.samples.items())}
    return SoakResult(summarise(records), trends, blocks, blocks_error)


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    arguments, parser = _parse(arguments_given)
    try:
        plan = SoakPlan(
            requests=arguments.requests,
            in_flight=arguments.in_flight,
            prompt_tokens=tuple(arguments.prompt_tokens),
            output_tokens=tuple(arguments.output_tokens),
            abort_share=arguments.abort_share,
            abort_within_s=arguments.abort_within_s,
        )
        server = ServerProcesses(patterns=tuple(arguments.memory_of))
    except ValueError as error:
        parser.error(str(error))
    seed = seed_from(arguments)
    report_progress(f"seed {seed}")

    async def run() -> SoakResult:
        model = arguments.model or await first_model(arguments.base_url)
        async with CompletionClient(arguments.base_url, model, timeout_s=arguments.timeout_s) as client:
            return await soak(
                client,
                plan,
                seed,
                server=server,
                sample_every_s=arguments.sample_every_s,
                blocks_url=arguments.base_url.rstrip("/") + arguments.blocks if arguments.blocks else None,
                settle_s=arguments.settle_s,
            )

    try:
        result = asyncio.run(run())
    except ConnectionError as error:
        report_progress(str(error))
        return 1
    tables, figures = _tables(result), {"seed": seed, **_figures(result)}
    if arguments.save:
        save(arguments, "load_tests.soak", arguments_given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return 0 if result.passed else 1


def _parse(arguments_given: list[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plan = SoakPlan()
    parser.add_argument("base_url", help="server address without /v1, e.g. http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=plan.requests, help="default %(default)s")
    parser.add_argument("--in-flight", type=int, default=plan.in_flight, help="default %(default)s")
    for name, default in (("--prompt-tokens", plan.prompt_tokens), ("--output-tokens", plan.output_tokens)):
        parser.add_argument(
            name, type=int, nargs=2, metavar=("MIN", "MAX"), default=default, help="default %(default)s"
        )
    parser.add_argument("--abort-share", type=float, default=plan.abort_share, help="default %(default)s")
    parser.add_argument("--abort-within-s", type=float, default=plan.abort_within_s, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is reported")
    parser.add_argument(
        "--memory-of", nargs="+", default=[], metavar="PATTERN", help="regular expressions for the server's processes"
    )
    parser.add_argument("--sample-every-s", type=float, default=5.0, help="between memory samples (default 5)")
    parser.add_argument("--blocks", default="/debug/blocks", help="path of the block counts, '' for none")
    parser.add_argument("--settle-s", type=float, default=1.0, help="for all blocks to be free (default 1)")
    parser.add_argument("--model", help="default: the first of GET /v1/models")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="limit for one request (default 600)")
    add_save_options(parser)
    return parser.parse_args(arguments_given), parser


def _figures(result: SoakResult) -> dict[str, Any]:
    return {
        **result.summary.as_row(),
        "memory": {label: dataclasses.asdict(trends) for label, trends in result.memory.items()},
        "blocks": None if result.blocks is None else dataclasses.asdict(result.blocks),
        "blocks_error": result.blocks_error,
        "passed": result.passed,
    }


def _tables(result: SoakResult) -> list[tuple[str, str]]:
    summary = result.summary
    blocks = "not looked at"
    if result.blocks is not None:
        live = sum(worker.live_blocks for worker in result.blocks.workers)
        waited = f"{result.blocks.waited_s:.2f} s after the end"
        blocks = f"all free {waited}" if result.blocks.all_free else f"{live} still held {waited}"
    requests = markdown_table(
        ("requests", "failed", "aborted", "short", "output tokens", "blocks"),
        [
            (
                *map(str, (summary.requests, summary.failed, summary.aborted, summary.short, summary.output_tokens)),
                result.blocks_error or blocks,
            )
        ],
    )
    memory = markdown_table(
        ("process", "RSS first, MiB", "RSS last, MiB", "RSS growth, MiB/h", "USS growth, MiB/h", "grows"),
        (
            (
                label,
                number(trends.first.rss_bytes / _MIB),
                number(trends.last.rss_bytes / _MIB),
                _hourly(trends.rss),
                _hourly(trends.uss),
                "yes" if any(t is not None and t.grows for t in (trends.rss, trends.uss)) else "no",
            )
            for label, trends in result.memory.items()
        ),
    )
    return [("Requests", requests), ("Memory, second half of the run", memory)]


def _hourly(memory: Trend | None) -> str:
    if memory is None:
        return "-"
    scale = 3600 / _MIB
    return f"{memory.slope_per_s * scale:.1f} ({memory.low_per_s * scale:.1f} to {memory.high_per_s * scale:.1f})"


if __name__ == "__main__":
    sys.exit(status_of(main))
