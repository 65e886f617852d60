"""Servers measured in turns on the same machine, and how they compare: what the programs that compare share.

Each server is started, measured and stopped before the next one, and then they begin again: A B A B. Runs of the same
round have the same prompts and make a pair.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from load_tests.client import first_model
from load_tests.ending import ending_kept
from load_tests.measured_run import SEEDS_PER_ROUND, LoadOptions, Row, measure, report_progress, warm_up
from load_tests.paired_ratio import RATIO_COLUMNS, paired_ratio
from load_tests.processes import ServerProcesses
from load_tests.run_tables import markdown_table, number, shown_figures
from load_tests.server_process import ServerProcess, ServerSpec
from load_tests.worker_work import CountersError, WorkerWork, ask_work
from load_tests.workloads import Workload


@dataclass(slots=True)
class Comparison:
    """All runs of all modes, in the order in which they were made."""

    modes: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    """Each has `mode`, `round` and `kept` besides a run's own figures."""
    failure: str | None = None
    exit_code: int = 0
    """Of a comparison that was told to end by a signal."""

    def kept(self) -> list[Row]:
        return [row for row in self.rows if row["kept"]]

    def pairs(self, workload: str, figure: str, mode: str) -> list[tuple[float, float]]:
        """(baseline, mode) values of the rounds in which both have a run that was kept."""
        by_mode: dict[str, dict[int, float]] = {self.modes[0]: {}, mode: {}}
        for row in self.kept():
            if row["workload"] == workload and row["mode"] in by_mode and row.get(figure) is not None:
                by_mode[row["mode"]][row["round"]] = row[figure]
        baseline, other = by_mode[self.modes[0]], by_mode[mode]
        return [(baseline[number], other[number]) for number in sorted(baseline.keys() & other.keys())]


def compare(
    specs: Sequence[ServerSpec],
    workloads: Sequence[Workload],
    *,
    rounds: int,
    seed: int,
    options: LoadOptions,
    attempts: int = 3,
    start_limit_s: float = 300.0,
    by_worker: bool = False,
    turn_about: bool = False,
) -> Comparison:
    """Runs all rounds. A server that fails, or SystemExit, ends the comparison, with the runs made so far and the
    reason in it. `by_worker`: of servers in Ray sessions of their own, what each worker did is asked and reported.
    `turn_about`: every other round takes the servers in reverse order, so that none always comes after the other."""
    comparison = Comparison(tuple(spec.name for spec in specs))
    with ending_kept(comparison, CountersError):
        for round_number in range(rounds):
            for spec in reversed(specs) if turn_about and round_number % 2 else specs:
                report_progress(f"round {round_number + 1} of {rounds}: starting {spec.name}")
                with ServerProcess(spec, start_limit_s=start_limit_s) as server:
                    base_seed = seed + round_number * SEEDS_PER_ROUND
                    read_work = _reader_of(server) if by_worker and spec.own_ray_session else None
                    coroutine = _measure_mode(spec, server, workloads, base_seed, options, attempts, read_work)
                    comparison.rows.extend(
                        {"mode": spec.name, "round": round_number, **row} for row in asyncio.run(coroutine)
                    )
    return comparison


def ratio_table(comparison: Comparison) -> tuple[str, list[dict[str, Any]]]:
    """The other modes against the first, as Markdown and as records."""
    baseline = comparison.modes[0]
    kept = comparison.kept()
    records: list[dict[str, Any]] = []
    for workload in dict.fromkeys(row["workload"] for row in kept):
        for figure in shown_figures(kept):
            for mode in comparison.modes[1:]:
                ratio = paired_ratio(comparison.pairs(workload, figure, mode))
                if ratio is not None:
                    records.append({"workload": workload, "figure": figure, "mode": mode, "ratio": ratio})
    table = markdown_table(
        ("workload", "figure", "mode", f"ratio to {baseline}", *RATIO_COLUMNS),
        ((record["workload"], record["figure"], record["mode"], *record["ratio"].cells()) for record in records),
    )
    return table, [{**record, "ratio": record["ratio"].as_record()} for record in records]


async def _measure_mode(
    spec: ServerSpec,
    server: ServerProcess,
    workloads: Sequence[Workload],
    seed: int,
    options: LoadOptions,
    attempts: int,
    read_work: Callable[[], Awaitable[list[WorkerWork]]] | None,
) -> list[Row]:
    model = options.model or await first_model(spec.base_url, options.api_key)
    processes = ServerProcesses(root_pids=(server.pid,))
    rows: list[Row] = []
    async with options.client(spec.base_url, model) as client:
        for workload in workloads:
            await warm_up(client, workload, seed, options)
            for attempt in range(attempts):
                result = await measure(client, workload, seed + attempt, options, processes, read_work)
                rows.append({**result.as_row(), "kept": result.is_usable})
                report_progress(
                    f"  {workload.name}: {number(rows[-1]['output_tokens_per_s'])} output tokens/s, "
                    f"{result.summary.failed} failed" + ("" if result.is_usable else ", thrown away")
                )
                if not result.has_foreign_load:
                    break
    return rows


def _reader_of(server: ServerProcess) -> Callable[[], Awaitable[list[WorkerWork]]]:
    address = server.ray_address()
    if address is None:
        raise CountersError("none of the server's processes names a Ray session, so its workers cannot be asked")
    return functools.partial(ask_work, address, with_token=True)
