"""What it costs to hold answers to a form: the server's CPU seconds per output token of free text, of a JSON schema
(`response_format`), and of a call of a tool that is required.

Starts one application and sends it the three kinds of chat in turns, each round with prompts of its own, and another
kind first. Every answer is cut at the same number of tokens: free text goes on after an end of sequence, and the form
is one that cannot be filled before. A run during which other processes used more of the machine than --foreign-limit is
repeated with another seed, up to --attempts times, and thrown away if that does not help. The result is the median of
the rounds' ratios to free text, with an interval, for the whole server and for its parts
(docs/metrics-of-load-tests.md).

Progress goes to stderr; stdout gets a Markdown table and, as its last line, one JSON object. The exit code is 1 when
the server failed, or a round has a kind without a run that counts.

    python -m load_tests.format_cost serve_configs/local.yaml --rounds 10 --save format-cost
    python -m load_tests.format_cost serve_configs/local.yaml --overlay serve_configs/overlays/bfloat16.yaml --rounds 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kv.exit_status import status_of
from load_tests.answer_forms import FREE_TEXT, KINDS, MOST_OUTPUT_TOKENS, FormError, check_forms
from load_tests.client import first_model
from load_tests.command_line import add_save_options, save, seed_from
from load_tests.cpu_time import LOAD_GENERATOR
from load_tests.ending import ending_kept, exit_on_sigterm
from load_tests.measured_run import SEEDS_PER_ROUND, LoadOptions, Row, measure, report_progress, warm_up
from load_tests.paired_ratio import RATIO_COLUMNS, paired_ratio
from load_tests.processes import ServerProcesses
from load_tests.run_tables import markdown_table, number
from load_tests.server_process import ServerProcess, ServerSpec, serve_config
from load_tests.workloads import Workload

PARTS = ("server", "workers", "ingress", "other")
"""The first is all of it."""
_SIDES = ("prompt_tokens", "output_tokens")


@dataclass(slots=True)
class FormatCost:
    """All runs, in the order in which they were made."""

    rows: list[Row] = field(default_factory=list)
    """Each has `kind`, `round`, `kept` and `cpu_ms_by_part` (per output token) besides a run's own figures."""
    failure: str | None = None
    exit_code: int = 0
    """Of a measurement that was told to end by a signal."""

    def pairs(self, kind: str, part: str) -> list[tuple[float, float]]:
        """(free text, kind) in CPU milliseconds per output token, of the rounds in which both have a run that was
        kept."""
        by_kind: dict[str, dict[int, float]] = {FREE_TEXT: {}, kind: {}}
        for row in self.rows:
            if row["kept"] and row["kind"] in by_kind:
                by_kind[row["kind"]][row["round"]] = row["cpu_ms_by_part"][part]
        free, held = by_kind[FREE_TEXT], by_kind[kind]
        return [(free[round_number], held[round_number]) for round_number in sorted(free.keys() & held.keys())]


def by_part(cpu_ms_by_label: Mapping[str, float]) -> dict[str, float]:
    """CPU time of the server's processes, as `process_label` names them, by `PARTS`; the load generator's is none."""
    parts = dict.fromkeys(PARTS, 0.0)
    for label, cpu_ms in cpu_ms_by_label.items():
        if label == LOAD_GENERATOR:
            continue
        part = "other"
        if label.startswith("ray::Worker"):
            part = "workers"
        elif label.startswith("ray::ServeReplica:") and label.endswith(":Ingress"):
            part = "ingress"
        parts[part] += cpu_ms
        parts["server"] += cpu_ms
    return parts


async def measure_kinds(
    cost: FormatCost,
    base_url: str,
    model: str,
    processes: ServerProcesses,
    shape: Workload,
    *,
    rounds: int,
    seed: int,
    options: LoadOptions,
    attempts: int,
) -> None:
    """Runs every kind once a round, and adds each run to `cost` when it has ended. The prompts are of `shape`, and no
    two kinds share one."""
    kinds = list(KINDS)
    for kind in kinds:
        kind_options = _options_of(kind, options)
        async with kind_options.client(base_url, model) as client:
            await warm_up(client, replace(shape, name=kind), seed, kind_options)
    for round_number in range(rounds):
        first = round_number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            kind_options = _options_of(kind, options)
            async with kind_options.client(base_url, model) as client:
                for attempt in range(attempts):
                    run_seed = seed + round_number * SEEDS_PER_ROUND + attempt
                    # The name is among what prompts are drawn from.
                    result = await measure(client, replace(shape, name=kind), run_seed, kind_options, processes)
                    row: Row = {"kind": kind, "round": round_number, **result.as_row()}
                    # A short answer would spread its prompt's cost over fewer tokens than the others do.
                    row["kept"] = result.is_usable and result.cpu.server_known and not result.summary.short
                    row["cpu_ms_by_part"] = by_part(row.get("cpu_ms_per_output_token", {}))
                    cost.rows.append(row)
                    report_progress(f"round {round_number + 1} of {rounds}: {_outcome(row)}")
                    if not result.has_foreign_load:
                        break


def measure_server(
    spec: ServerSpec, shape: Workload, *, rounds: int, seed: int, options: LoadOptions, attempts: int
) -> FormatCost:
    """Starts the server, sees that it gives answers of every kind, and measures. A server that fails, or SystemExit,
    ends it, with the runs made so far and the reason."""
    cost = FormatCost()
    with ending_kept(cost, FormError), ServerProcess(spec) as server:
        model = asyncio.run(first_model(spec.base_url))
        asyncio.run(check_forms(spec.base_url, model))
        processes = ServerProcesses(root_pids=(server.pid,))
        asyncio.run(
            measure_kinds(
                cost,
                spec.base_url,
                model,
                processes,
                shape,
                rounds=rounds,
                seed=seed,
                options=options,
                attempts=attempts,
            )
        )
    return cost


def cost_table(cost: FormatCost) -> tuple[str, list[dict[str, Any]]]:
    """What was kept, by kind and part, as Markdown and as records."""
    lines: list[tuple[str, ...]] = []
    records: list[dict[str, Any]] = []
    for kind in KINDS:
        kept = [row for row in cost.rows if row["kind"] == kind and row["kept"]]
        for part in PARTS if kept else ():
            values = [row["cpu_ms_by_part"][part] for row in kept]
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            tokens = [statistics.median(row[side] / row["requests"] for row in kept) for side in _SIDES]
            ratio = None if kind == FREE_TEXT else paired_ratio(cost.pairs(kind, part))
            records.append(
                {
                    "kind": kind,
                    "part": part,
                    **dict(zip(_SIDES, tokens, strict=True)),
                    "cpu_ms_per_output_token": {name: round(value, 4) for name, value in spread.items()},
                    "ratio": None if ratio is None else ratio.as_record(),
                }
            )
            cpu_ms = f"{number(spread['median'])} ({number(spread['min'])}-{number(spread['max'])})"
            cells = ("-",) * (1 + len(RATIO_COLUMNS)) if ratio is None else ratio.cells()
            lines.append((kind, part, *map(number, tokens), cpu_ms, *cells))
    columns = ("kind", "part", "prompt tokens", "output tokens", "CPU ms per output token", f"ratio to {FREE_TEXT}")
    return markdown_table((*columns, *RATIO_COLUMNS), lines), records


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.format_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="the Serve config to start, e.g. serve_configs/local.yaml")
    parser.add_argument("--overlay", metavar="FILE", help="merged over the config's args")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where it answers (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of runs (default %(default)s)")
    parser.add_argument("--requests", type=int, default=16, help="of each run (default %(default)s)")
    parser.add_argument("--in-flight", type=int, default=8, help="requests at a time (default %(default)s)")
    parser.add_argument("--prompt-words", type=int, default=32, help="default %(default)s")
    parser.add_argument("--output-tokens", type=int, default=128, help="of every answer (default %(default)s)")
    parser.add_argument("--attempts", type=int, default=3, help="runs at most to get one without foreign load")
    parser.add_argument(
        "--foreign-limit",
        type=float,
        default=0.05,
        help="share of the machine's CPU time that other processes may use in a run that counts (default 0.05)",
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a fresh one, which is reported")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    try:
        if min(arguments.rounds, arguments.attempts, arguments.in_flight) < 1:
            raise ValueError("--rounds, --attempts and --in-flight must be at least 1")
        if not 1 <= arguments.output_tokens <= MOST_OUTPUT_TOKENS:
            raise ValueError(f"--output-tokens is {arguments.output_tokens}, must be from 1 to {MOST_OUTPUT_TOKENS}")
        shape = Workload("chat", arguments.requests, arguments.prompt_words, arguments.output_tokens)
        spec = serve_config("app", arguments.config, arguments.url, arguments.overlay)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    seed = seed_from(arguments)
    report_progress(f"seed {seed}")
    exit_on_sigterm()
    cost = measure_server(
        spec,
        shape,
        rounds=arguments.rounds,
        seed=seed,
        options=LoadOptions(in_flight=arguments.in_flight, foreign_limit=arguments.foreign_limit),
        attempts=arguments.attempts,
    )
    table, records = cost_table(cost)
    figures = {"runs": cost.rows, "costs": records, "failure": cost.failure}
    if arguments.save and cost.rows:
        save(arguments, "load_tests.format_cost", arguments_given, [("CPU time by kind of answer", table)], figures)
    print(table)
    print(json.dumps(figures))
    has_all_pairs = all(len(cost.pairs(kind, PARTS[0])) == arguments.rounds for kind in KINDS)
    return cost.exit_code or int(bool(cost.failure) or not has_all_pairs)


def _options_of(kind: str, options: LoadOptions) -> LoadOptions:
    return replace(options, api="chat", prompt_kind="text", extra=KINDS[kind])


def _outcome(row: Row) -> str:
    return (
        f"{row['kind']}: {number(row['cpu_ms_by_part']['server'])} ms of CPU per output token, {row['failed']} failed, "
        f"{row['short']} short" + ("" if row["kept"] else ", thrown away")
    )


if __name__ == "__main__":
    sys.exit(status_of(main))
