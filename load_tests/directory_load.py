"""How fast the store's directory answers, and how much memory its index takes.

Answers: one directory actor, or --shards of them, in a Ray session of its own, lists --blocks blocks in extents of 10
to 30, of chains of 250 blocks (4,000 tokens) that begin with one of 20 roots, used by Zipf's law. It is asked for whole
chains, --rate lookups a second in an open loop, by 16 readers in turns, and every lease is released; four of five
chains are stored, of the fifth only the root is. In turns with that it gets calls of the same size at the same rate
that look nothing up: what Ray's calls take by themselves. Latencies begin when a call is due, so a client that is late
(lateness) makes them look worse, never better.

Memory: a directory is filled with --index-blocks blocks in extents of 1, 10 and 30, each in a fresh process whose
growth is looked at, and then told that all of them are on disk too. The exit code is 1 when one takes more than the
limit.

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object.

    python -m load_tests.directory_load --rate 500 --seconds 20 --repeats 5 --save directory
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import ray

from kv.directory_actor import DirectoryActor
from kv.directory_client import DirectoryClient
from kv.exit_status import status_of
from kv.keys import KEY_BYTES
from load_tests.arrivals import at_rate
from load_tests.block_forest import BlockForest
from load_tests.command_line import RATES_PER_S, add_save_options, save
from load_tests.driver import clock_s, drive
from load_tests.index_size import IndexSize, measure_index
from load_tests.measured_run import report_progress
from load_tests.paired_ratio import paired_ratio
from load_tests.request_record import RequestRecord
from load_tests.run_tables import markdown_table, number
from load_tests.store_rig import LIMIT_S, local_ray
from tuning.option_types import above_0, between

INDEX_LIMIT_BYTES = 10**9
"""For a million blocks."""
_LEASE_S = 30.0
_READERS = 16
_STORED_SHARE = 0.8
_Keys = tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Calls of one kind, made for a while."""

    kind: str
    """lookup, or bare call"""
    calls: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    lateness_p99_ms: float
    cpu_share: float
    """CPU time of the directory's process by wall time; of the busiest of several."""
    hit_share: float
    """Of the blocks that were asked for."""


class LoadedDirectory:
    """The actors of a directory with `num_blocks` blocks, and prompts to ask it for."""

    def __init__(self, num_blocks: int, seed: int, num_shards: int = 1) -> None:
        actor: Any = DirectoryActor
        options = {"enable_task_events": False}  # as in the app
        self._shards = [actor.options(**options).remote(None, number) for number in range(num_shards)]
        self._forest = BlockForest(seed)
        self._rng = random.Random(f"prompts/{seed}")
        self._chains: list[_Keys] = []
        asyncio.run(self._fill(num_blocks))
        self._rng.shuffle(self._chains)
        self._weights = [1 / rank for rank in range(1, len(self._chains) + 1)]
        self._processes = [
            psutil.Process(ray.get(shard.__ray_call__.remote(lambda _: os.getpid()), timeout=LIMIT_S))
            for shard in self._shards
        ]

    def close(self) -> None:
        """Ends the actors."""
        for shard in self._shards:
            ray.kill(shard)

    def prompts(self, count: int) -> list[_Keys]:
        """Chains to ask for: most of them stored, some more often than others."""
        stored = self._rng.choices(self._chains, self._weights, k=count)
        return [keys if self._rng.random() < _STORED_SHARE else self._forest.new_prompt()[0] for keys in stored]

    def measure(self, kind: str, rate_per_s: float, seconds: float, seed: int) -> Window:
        """Lookups, or bare calls, at a rate for so long."""
        plan = at_rate(max(1, round(rate_per_s * seconds)), rate_per_s, seed)
        prompts = self.prompts(len(plan.due_s))
        hits: list[float] = []
        readers = [DirectoryClient(self._shards) for _ in range(_READERS)]

        async def send(index: int, scheduled_s: float) -> RequestRecord:
            record = RequestRecord(scheduled_s, wanted_output_tokens=1, sent_s=clock_s())
            reader, keys = readers[index % _READERS], prompts[index]
            if kind == "lookup":
                found = await reader.lookup(keys, _LEASE_S)
                if found.lease_id is not None:
                    reader.release(found.lease_id)
                hits.append(found.num_blocks / len(keys))
            else:
                # The first key is that of no chain, so nothing more is looked up; it goes where the chain would.
                await reader.match_blocks((keys[0][:4] + bytes(KEY_BYTES - 4), *keys[1:]))
            record.ended_s = clock_s()
            return record

        cpu_s, started_s = self._cpu_s(), time.perf_counter()
        records = asyncio.run(drive(plan, send))
        busiest_s = max(after_s - before_s for before_s, after_s in zip(cpu_s, self._cpu_s(), strict=True))
        cpu_share = busiest_s / (time.perf_counter() - started_s)
        for reader in readers:
            reader.send_released()
        latencies_ms = [1e3 * (record.ended_s - record.scheduled_s) for record in records]
        return Window(
            kind,
            len(records),
            float(np.quantile(latencies_ms, 0.5)),
            float(np.quantile(latencies_ms, 0.99)),
            max(latencies_ms),
            float(np.quantile([1e3 * (record.sent_s - record.scheduled_s) for record in records], 0.99)),
            cpu_share,
            statistics.mean(hits) if hits else 0.0,
        )

    async def _fill(self, num_blocks: int) -> None:
        writer = DirectoryClient(self._shards)
        for chain in self._forest.chains(num_blocks):
            ticket = await writer.begin_put(chain.keys, LIMIT_S)
            if ticket.put_id is None or not await writer.commit_put(ticket.put_id, chain.extents):
                raise RuntimeError("the directory refused a put")
            self._chains.append(chain.keys)

    def _cpu_s(self) -> list[float]:
        return [float(times.user + times.system) for times in (process.cpu_times() for process in self._processes)]


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.directory_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python -m load_tests.directory_load --blocks 1000000 --repeats 5",
    )
    parser.add_argument("--blocks", type=int, default=100_000, help="that the actor lists (default %(default)s)")
    parser.add_argument(
        "--shards", type=int, default=1, help="actors that the directory is divided over (default %(default)s)"
    )
    parser.add_argument(
        "--rate", type=between(*RATES_PER_S), default=500.0, help="calls per second (default %(default)g)"
    )
    parser.add_argument("--seconds", type=above_0, default=20.0, help="of each kind in a repeat (default %(default)g)")
    parser.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of chains, prompts and arrivals (default %(default)s)")
    parser.add_argument(
        "--index-blocks", type=int, default=1_000_000, help="of each index; 0: none is measured (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="5,000 blocks, 50 calls/s for 1 s, index of 20,000 blocks")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.quick:
        quick = {"blocks": 5000, "rate": 50.0, "seconds": 1.0, "repeats": 1, "index_blocks": 20_000}
        vars(arguments).update(quick)
    if min(arguments.blocks, arguments.shards, arguments.repeats) <= 0 or arguments.index_blocks < 0:
        parser.error("--blocks, --shards and --repeats must be above 0, --index-blocks at least 0")

    windows = _measure_answers(arguments)
    sizes: list[IndexSize] = []
    for extent_blocks in (1, 10, 30) if arguments.index_blocks else ():
        report_progress(f"{arguments.index_blocks} blocks in extents of {extent_blocks}")
        sizes.append(measure_index(arguments.index_blocks, extent_blocks))
    ratio = paired_ratio(
        [
            (bare.p50_ms, lookup.p50_ms)
            for bare, lookup in zip(_of(windows, "bare call"), _of(windows, "lookup"), strict=True)
        ]
    )
    tables = [("Answers", _answer_table(windows)), ("Index", _index_table(sizes))]
    figures = {
        "windows": [dataclasses.asdict(window) for window in windows],
        "lookup_to_bare_call_p50": None if ratio is None else dataclasses.asdict(ratio),
        "index": [{**dataclasses.asdict(size), "bytes_per_block": size.bytes_per_block} for size in sizes],
        "index_limit_bytes": INDEX_LIMIT_BYTES,
    }
    if arguments.save:
        save(arguments, "load_tests.directory_load", arguments_given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return 1 if too_large(sizes) else 0


def too_large(sizes: Sequence[IndexSize]) -> list[IndexSize]:
    """Those beyond the limit."""
    return [size for size in sizes if size.both_bytes > INDEX_LIMIT_BYTES]


def _measure_answers(arguments: argparse.Namespace) -> list[Window]:
    windows: list[Window] = []
    with local_ray(object_store_bytes=128 * 1024 * 1024):
        report_progress(f"filling a directory with {arguments.blocks} blocks")
        directory = LoadedDirectory(arguments.blocks, arguments.seed, arguments.shards)
        for kind in ("lookup", "bare call"):  # warms up both
            directory.measure(kind, arguments.rate, min(1.0, arguments.seconds), arguments.seed)
        for repeat in range(arguments.repeats):
            for kind in ("lookup", "bare call") if repeat % 2 else ("bare call", "lookup"):
                seed = 1000 * arguments.seed + repeat
                windows.append(directory.measure(kind, arguments.rate, arguments.seconds, seed))
                report_progress(f"repeat {repeat + 1}: {windows[-1]}")
    return windows


def _of(windows: Sequence[Window], kind: str) -> list[Window]:
    return [window for window in windows if window.kind == kind]


def _answer_table(windows: Sequence[Window]) -> str:
    columns = ("p50_ms", "p99_ms", "max_ms", "lateness_p99_ms", "cpu_share", "hit_share")
    rows = []
    for kind in ("lookup", "bare call"):
        chosen = _of(windows, kind)
        cells = []
        for column in columns:
            values = [getattr(window, column) for window in chosen]
            cells.append(f"{number(statistics.median(values))} ({number(min(values))}-{number(max(values))})")
        rows.append((kind, str(sum(window.calls for window in chosen)), *cells))
    return markdown_table(("call", "calls", *columns), rows)


def _index_table(sizes: Sequence[IndexSize]) -> str:
    return markdown_table(
        ("blocks", "blocks in an extent", "extents", "in DRAM, MB", "on disk too, MB", "bytes a block"),
        (
            (
                f"{size.num_blocks:,}",
                str(size.extent_blocks),
                f"{size.num_extents:,}",
                f"{size.dram_bytes / 1e6:.0f}",
                f"{size.both_bytes / 1e6:.0f}",
                f"{size.bytes_per_block:.0f}",
            )
            for size in sizes
        ),
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
