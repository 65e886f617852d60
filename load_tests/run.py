"""Loads a running OpenAI-compatible server and reports throughput, latencies and CPU time.

What is measured and how is in docs/metrics-of-load-tests.md. Progress goes to stderr; stdout gets a Markdown table of
medians and, as its last line, one JSON object with every figure. The exit code is 1 when a request failed.

    python -m load_tests.run http://127.0.0.1:8000 -w prefill-heavy decode-heavy --repeat 3 \\
        --cpu-of ray:: raylet gcs_server
    python -m load_tests.run http://127.0.0.1:8000 -w balanced --rate 4 --slo-ttft-s 1 --slo-tpot-s 0.1 --save open-loop
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kv.exit_status import status_of
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
from load_tests.processes import ServerProcesses
from load_tests.run_tables import median_table, medians, number
from load_tests.workloads import Workload


async def run_all(
    base_url: str,
    workloads: Sequence[Workload],
    *,
    seed: int,
    repeat: int,
    options: LoadOptions,
    server: ServerProcesses,
    out: Path | None = None,
) -> list[Row]:
    """Runs each workload `repeat` times, with seeds `seed`, `seed + 1` and so on, and returns one row a run.

    Appends each row to the file `out` as soon as it is there. Raises ConnectionError when the server names no model.
    """
    model = options.model or await first_model(base_url, options.api_key)
    rows: list[Row] = []
    async with options.client(base_url, model) as client:
        for workload in workloads:
            report_progress(_offer(options.shaped(workload), options))
            await warm_up(client, workload, seed, options)
            for run_seed in range(seed, seed + repeat):
                row = (await measure(client, workload, run_seed, options, server)).as_row()
                if server.patterns and row["foreign_cpu_share"] is None:
                    report_progress(f"no process matches {' or '.join(server.patterns)}")
                rows.append(row)
                report_progress(_outcome(row))
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base_url", help="server address without /v1, e.g. http://127.0.0.1:8000")
    add_load_options(parser)
    parser.add_argument("--repeat", type=int, default=1, help="runs per workload, each with its own seed (default 1)")
    parser.add_argument(
        "--cpu-of",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="regular expressions for the command lines of the server's processes, whose CPU time is to be measured",
    )
    parser.add_argument("--out", type=Path, help="append one JSON line per run to this file")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    try:
        if arguments.repeat < 1:
            raise ValueError(f"--repeat is {arguments.repeat}, must be at least 1")
        options, workloads = load_options_from(arguments), workloads_from(arguments)
        server = ServerProcesses(patterns=tuple(arguments.cpu_of))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    seed = seed_from(arguments)
    report_progress(f"seed {seed}")
    try:
        rows = asyncio.run(
            run_all(
                arguments.base_url,
                workloads,
                seed=seed,
                repeat=arguments.repeat,
                options=options,
                server=server,
                out=arguments.out,
            )
        )
    except ConnectionError as error:
        report_progress(str(error))
        return 1
    figures = {"runs": rows, "medians": medians(rows)}
    table = median_table(rows)
    if arguments.save:
        save(arguments, "load_tests.run", arguments_given, [("Medians", table)], figures)
    print(table)
    print(json.dumps(figures))
    return 1 if any(row["failed"] for row in rows) else 0


def _offer(workload: Workload, options: LoadOptions) -> str:
    text = (
        f"{workload.name}: {workload.requests} requests of {workload.prompt_tokens} prompt and "
        f"{workload.output_tokens} output tokens"
    )
    if workload.swing is not None:
        other = workload.swing.other
        text += f", in turns with others of {other.prompt_tokens} and {other.output_tokens}"
    if workload.rate_per_s is not None:
        text += f", offered: {number(workload.rate_per_s * workload.output_tokens)} output tokens/s"
    return text


def _outcome(row: Row) -> str:
    text = (
        f"{row['workload']} seed {row['seed']}: {number(row['output_tokens_per_s'])} output tokens/s, "
        f"TTFT p50 {number(row['ttft_p50_ms'])} ms, ITL p99 {number(row['itl_p99_ms'])} ms, "
        f"{row['failed']} failed, {row['short']} short"
    )
    if row["foreign_load"]:
        text += f"; FOREIGN LOAD: other processes used {100 * row['foreign_cpu_share']:.0f} % of the CPU"
    return text + (f"; {row['errors']}" if "errors" in row else "")


if __name__ == "__main__":
    sys.exit(status_of(main))
