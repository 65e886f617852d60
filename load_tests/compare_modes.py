"""Compares configurations of the server, or servers, by interleaved runs on the same machine.

The modes are started one at a time and in turns (A B A B ...), each round with prompts that are new and the same for
every mode. A run during which other processes used more of the machine than --foreign-limit is repeated with another
seed, up to --attempts times, and thrown away if that does not help. The first mode is the baseline: the others'
results are the median of the rounds' ratios to it, with an interval (docs/metrics-of-load-tests.md).

Progress goes to stderr; stdout gets Markdown tables and, as its last line, one JSON object. The exit code is 1 when a
server failed or a request failed.

    python -m load_tests.compare_modes --serve monolithic=serve_configs/local-monolithic.yaml \\
        --serve static=serve_configs/local.yaml -w decode-heavy shared-prefix --rounds 10 --save modes

A configuration with an overlay: --serve mine=serve_configs/local.yaml --overlay-of mine=overlay.yaml. A server of
another kind is given as a command: --command 'vllm=python -m vllm.entrypoints.openai.api_server --model m
--port 8100' --url-of vllm=http://127.0.0.1:8100
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from load_tests.client import first_model
from load_tests.command_line import (
    add_load_options,
    add_save_options,
    load_options_from,
    save,
    seed_from,
    workloads_from,
)
from load_tests.measured_run import LoadOptions, Row, measure, report_progress, warm_up
from load_tests.paired_ratio import PairedRatio, paired_ratio
from load_tests.processes import ServerProcesses
from load_tests.run_tables import markdown_table, median_table, medians, number, shown_figures
from load_tests.server_process import ServerFailedError, ServerProcess, ServerSpec, serve_config, server_command
from load_tests.worker_work import CountersError, WorkerWork, ask_work
from load_tests.workloads import Workload

_SEEDS_PER_ROUND = 1000


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
    `turn_about`: every other round takes the modes in reverse order, so that none always comes after the other."""
    comparison = Comparison(tuple(spec.name for spec in specs))
    try:
        for round_number in range(rounds):
            for spec in reversed(specs) if turn_about and round_number % 2 else specs:
                report_progress(f"round {round_number + 1} of {rounds}: starting {spec.name}")
                with ServerProcess(spec, start_limit_s=start_limit_s) as server:
                    base_seed = seed + round_number * _SEEDS_PER_ROUND
                    read_work = _reader_of(server) if by_worker and spec.own_ray_session else None
                    coroutine = _measure_mode(spec, server, workloads, base_seed, options, attempts, read_work)
                    comparison.rows.extend(
                        {"mode": spec.name, "round": round_number, **row} for row in asyncio.run(coroutine)
                    )
    except (ServerFailedError, ConnectionError, CountersError) as error:
        comparison.failure = str(error)
        report_progress(comparison.failure)
    except SystemExit as ended:
        comparison.failure, comparison.exit_code = "it was told to end", int(ended.code or 0)
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
        ("workload", "figure", "mode", f"ratio to {baseline}", "interval", "coverage", "pairs"),
        ((record["workload"], record["figure"], record["mode"], *_ratio_cells(record["ratio"])) for record in records),
    )
    return table, [{**record, "ratio": _ratio_record(record["ratio"])} for record in records]


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.compare_modes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    modes = parser.add_argument_group("modes (at least two, the first is the baseline)")
    modes.add_argument("--serve", dest="modes", action="append", metavar="NAME=CONFIG", type=_serve_mode, default=[])
    modes.add_argument("--command", dest="modes", action="append", metavar="NAME=COMMAND", type=_command_mode)
    modes.add_argument("--url", default="http://127.0.0.1:8000", help="where the servers answer (default %(default)s)")
    modes.add_argument(
        "--url-of", action="append", default=[], metavar="NAME=URL", type=_name_and_value, help="where one answers"
    )
    modes.add_argument(
        "--overlay-of",
        action="append",
        default=[],
        metavar="NAME=FILE",
        type=_name_and_value,
        help="an overlay over one mode's config",
    )
    parser.add_argument(
        "--by-worker",
        action="store_true",
        help="report also, of --serve modes, what each worker computed and fetched and how evenly that was spread",
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
    arguments = parser.parse_args(arguments_given)
    try:
        options, workloads = load_options_from(arguments), workloads_from(arguments)
        specs = _specs(arguments)
        if arguments.rounds < 1 or arguments.attempts < 1:
            raise ValueError("--rounds and --attempts must be at least 1")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # The default action would end this process and leave the server behind.
    signal.signal(signal.SIGTERM, _exit_on_signal)
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
    ratios, ratio_records = ratio_table(comparison)
    by = ("mode", "workload")
    figures = {
        "runs": comparison.rows,
        "medians": medians(comparison.kept(), by),
        "ratios": ratio_records,
        "failure": comparison.failure,
    }
    tables = [("Ratios", ratios), ("Medians", median_table(comparison.kept(), by))]
    if arguments.save and comparison.rows:
        save(arguments, "load_tests.compare_modes", arguments_given, tables, figures)
    print("\n\n".join(table for _, table in tables))
    print(json.dumps(figures))
    return comparison.exit_code or int(bool(comparison.failure) or any(row["failed"] for row in comparison.rows))


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


def _serve_mode(text: str) -> tuple[str, str, str]:
    return "serve", *_name_and_value(text)


def _command_mode(text: str) -> tuple[str, str, str]:
    return "command", *_name_and_value(text)


def _name_and_value(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


def _specs(arguments: argparse.Namespace) -> list[ServerSpec]:
    urls, overlays = dict(arguments.url_of), dict(arguments.overlay_of)
    specs: list[ServerSpec] = []
    for kind, name, value in arguments.modes:
        url = urls.pop(name, arguments.url)
        if kind == "serve":
            specs.append(serve_config(name, value, url, overlays.pop(name, None)))
        else:
            specs.append(server_command(name, value, url))
    names = [spec.name for spec in specs]
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"the modes are {names}; give at least two, each with its own name")
    if urls:
        raise ValueError(f"--url-of names {', '.join(urls)}, which is none of the modes {', '.join(names)}")
    if overlays:
        raise ValueError(f"--overlay-of names {', '.join(overlays)}, which is none of the modes of --serve")
    return specs


def _ratio_cells(ratio: PairedRatio) -> tuple[str, ...]:
    return (
        f"{ratio.median:.3f}",
        f"{ratio.low:.3f}-{ratio.high:.3f}",
        f"{100 * ratio.coverage:.0f} %",
        str(ratio.pairs),
    )


def _ratio_record(ratio: PairedRatio) -> dict[str, float]:
    return {
        "median": round(ratio.median, 4),
        "low": round(ratio.low, 4),
        "high": round(ratio.high, 4),
        "coverage": round(ratio.coverage, 4),
        "pairs": ratio.pairs,
    }


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: the way out ends the server and must not be cut short.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
