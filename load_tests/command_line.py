"""The options that the programs of this folder share, and what they are turned into."""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.measured_run import LoadOptions, report_progress
from load_tests.metrics import ServiceLevel
from load_tests.results_file import RESULTS_FOLDER, write_results
from load_tests.workloads import (
    DEFAULT_TOKEN_IDS,
    POOL_MULTIPLE,
    POOL_TOKENS,
    WORKING_SET,
    WORKLOADS,
    Workload,
    working_set,
)
from tuning.option_types import above_0, at_least_0, between

_LEAST_BURSTINESS = 0.01
"""With less all requests of a run come at once."""
RATES_PER_S = 1e-6, 1e6
"""The least and the most arrivals. With more all requests come at once, and with a duration there is no memory for so
many."""
CUSTOM = "custom"
FOUR_LOADS = ["prefill-heavy", "decode-heavy", "balanced", "shared-prefix"]


def add_load_options(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("workload")
    load.add_argument(
        "-w",
        "--workloads",
        nargs="+",
        default=FOUR_LOADS,
        choices=[*WORKLOADS, CUSTOM],
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)}, or {CUSTOM}, whose shape the next five options give (default: the first four)",
    )
    load.add_argument("--requests", type=int, default=32, help="custom: number of requests (default 32)")
    load.add_argument("--prompt-tokens", type=int, default=256, help="custom: whole prompt length (default 256)")
    load.add_argument("--output-tokens", type=int, default=64, help="custom: tokens to generate (default 64)")
    load.add_argument("--prefixes", type=int, default=0, help="custom: number of common prefixes (default none)")
    load.add_argument("--prefix-tokens", type=int, default=0, help="custom: length of each common prefix")
    load.add_argument(
        "--pool-tokens",
        type=int,
        default=POOL_TOKENS,
        help=f"{WORKING_SET}: tokens that the KV pool of one worker holds (default %(default)s)",
    )
    load.add_argument(
        "--pool-multiple",
        type=float,
        default=POOL_MULTIPLE,
        help=f"{WORKING_SET}: the common prefixes take so many times the pool (default %(default)s)",
    )
    load.add_argument("--scale", type=above_0, default=1.0, help="multiplies the numbers of requests, for a quick look")
    load.add_argument(
        "--seed",
        type=int,
        default=None,
        help="prompts and arrivals are drawn from it; a running server must not meet one twice, or it has the prompts "
        "in its cache (default: a fresh one, which is reported)",
    )
    load.add_argument("--prompt", choices=["ids", "text"], default="ids", help="token ids (default) or words")
    add_token_ids_option(load)
    load.add_argument("--warm-up", type=int, default=4, help="unmeasured requests before each workload (default 4)")

    group = parser.add_argument_group("arrivals")
    group.add_argument("--duration-s", type=above_0, help="with --rate: as many requests as arrive in so long")
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="with --rate: 1 is a Poisson process (default), less is burstier"
    )
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--in-flight", type=int, default=16, help="closed loop: requests in flight (default 16)")
    arrivals.add_argument(
        "--rate",
        type=between(*RATES_PER_S),
        nargs="+",
        help="open loop: arrivals per second; several: each workload at each of them",
    )
    arrivals.add_argument("--times", type=Path, help="open loop: a file with one arrival time in seconds per line")

    judged = parser.add_argument_group("judgement")
    judged.add_argument("--slo-ttft-s", type=above_0, help="with --slo-tpot-s: report SLO attainment and goodput")
    judged.add_argument("--slo-tpot-s", type=above_0)
    judged.add_argument(
        "--foreign-limit",
        type=at_least_0,
        default=0.05,
        help="share of the machine's CPU time that other processes may use before a run is marked (default 0.05)",
    )

    server = parser.add_argument_group("server")
    server.add_argument("--model", help="default: the first of GET /v1/models")
    server.add_argument("--api", choices=["completions", "chat"], default="completions")
    server.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        help="environment variable with the bearer token, if it is set (default OPENAI_API_KEY)",
    )
    server.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into every request's body")
    server.add_argument("--timeout-s", type=above_0, default=600.0, help="limit for one request (default 600)")


def add_token_ids_option(parser: argparse._ActionsContainer) -> None:
    """What prompts are drawn from."""
    parser.add_argument(
        "--token-ids",
        type=int,
        nargs=2,
        metavar=("FIRST", "END"),
        default=(DEFAULT_TOKEN_IDS.start, DEFAULT_TOKEN_IDS.stop),
        help="ids are drawn from [FIRST, END); default %(default)s",
    )


def add_save_options(parser: argparse.ArgumentParser) -> None:
    saved = parser.add_argument_group("result files")
    saved.add_argument("--save", metavar="NAME", help="write <date>-NAME.md and <date>-NAME.json")
    saved.add_argument(
        "--save-in", type=Path, default=RESULTS_FOLDER, metavar="FOLDER", help="default: load_tests/results"
    )


def save(
    arguments: argparse.Namespace,
    module: str,
    arguments_given: Sequence[str],
    tables: Sequence[tuple[str, str]],
    figures: dict[str, Any],
) -> None:
    """Writes the result files that `--save` asked for, and says where they are."""
    command = ["python", "-m", module, *arguments_given]
    for path in write_results(
        arguments.save, command=command, tables=tables, figures=figures, folder=arguments.save_in
    ):
        report_progress(f"wrote {path}")


def workloads_from(arguments: argparse.Namespace) -> list[Workload]:
    """The chosen workloads, scaled. Raises ValueError."""
    chosen = []
    for name in dict.fromkeys(arguments.workloads):
        if name == WORKING_SET:
            workload = working_set(arguments.pool_tokens, arguments.pool_multiple)
        elif name == CUSTOM:
            workload = Workload(
                CUSTOM,
                requests=arguments.requests,
                unique_tokens=arguments.prompt_tokens - arguments.prefix_tokens,
                output_tokens=arguments.output_tokens,
                prefixes=arguments.prefixes,
                prefix_tokens=arguments.prefix_tokens,
            )
        else:
            workload = WORKLOADS[name]
        workload = workload.scaled(arguments.scale)
        chosen += [workload] if arguments.rate is None else workload.at_rates(arguments.rate, arguments.duration_s)
    for workload in chosen:
        if workload.swing is not None and workload.requests <= workload.swing.stretch:
            raise ValueError(
                f"workload {workload.name!r} has {workload.requests} requests, and the first {workload.swing.stretch} "
                "of them are of one shape, so that it would never swing; give a larger --scale, or with --rate a "
                "longer --duration-s"
            )
    return chosen


def load_options_from(arguments: argparse.Namespace) -> LoadOptions:
    """Raises ValueError or OSError for values that cannot be used."""
    if (arguments.slo_ttft_s is None) != (arguments.slo_tpot_s is None):
        raise ValueError("an SLO has two limits; give --slo-ttft-s and --slo-tpot-s, or neither")
    if arguments.api == "chat" and arguments.prompt == "ids":
        raise ValueError("the chat endpoint takes no token ids; add --prompt text")
    if not isinstance(arguments.extra, dict):
        raise ValueError(f"--extra is {arguments.extra!r}; give a JSON object")
    if arguments.in_flight < 1 or arguments.warm_up < 0:
        raise ValueError(
            f"--in-flight is {arguments.in_flight} (at least 1), --warm-up is {arguments.warm_up} (at least 0)"
        )
    if arguments.rate is None and (arguments.duration_s is not None or arguments.burstiness != 1):
        raise ValueError("--duration-s and --burstiness are of arrivals at a rate; give --rate too")
    if arguments.duration_s is not None and arguments.scale != 1:
        raise ValueError("--scale and --duration-s both say how many requests there are; give one of them")
    if arguments.rate is not None:
        names = {f"{rate:g}" for rate in arguments.rate}
        if len(names) < len(arguments.rate):
            raise ValueError(f"--rate is {arguments.rate}; give each once")
        if not _LEAST_BURSTINESS <= arguments.burstiness < math.inf:
            raise ValueError(f"--burstiness is {arguments.burstiness}; it must be at least {_LEAST_BURSTINESS}")
    return LoadOptions(
        in_flight=arguments.in_flight,
        burstiness=arguments.burstiness,
        times_s=None if arguments.times is None else read_times(arguments.times),
        prompt_kind=arguments.prompt,
        token_ids=range(*arguments.token_ids),
        warm_up_requests=arguments.warm_up,
        level=None if arguments.slo_ttft_s is None else ServiceLevel(arguments.slo_ttft_s, arguments.slo_tpot_s),
        foreign_limit=arguments.foreign_limit,
        api=arguments.api,
        model=arguments.model,
        api_key=os.environ.get(arguments.api_key_env) or None,
        extra=arguments.extra,
        timeout_s=arguments.timeout_s,
    )


def seed_from(arguments: argparse.Namespace) -> int:
    return secrets.randbelow(2**31) if arguments.seed is None else int(arguments.seed)


def read_times(path: Path) -> tuple[float, ...]:
    """Arrival times in seconds, one a line; empty lines are skipped. Raises ValueError naming the line."""
    times_s = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            try:
                times_s.append(float(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {line!r} is no time in seconds") from error
    if not times_s:
        raise ValueError(f"{path} holds no arrival times")
    return tuple(times_s)
