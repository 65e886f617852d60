"""Times-to-live for groups of blocks: `python -m tuning.ttl --trace FILE --capacity-blocks 20000 --out policy.json`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from kv.exit_status import status_of, stop_printing
from kv.policy.policy_file import dump
from tuning.option_types import above_0_or_inf, share, whole
from tuning.simulator.group_roots import root_key
from tuning.trace import formats
from tuning.trace.errors import TraceError, TraceFileError, TraceUsageError
from tuning.trace.reading import read_trace
from tuning.trace.trace import PartialBlocks
from tuning.trace.writing import replacing
from tuning.ttl.comparison import on_the_same_trace, on_the_second_half
from tuning.ttl.curves import least_useful_block_s
from tuning.ttl.fit import FitOptions, GroupTtlFit, fit
from tuning.ttl.live_keys import live_keys
from tuning.ttl.policy import to_policy_spec
from tuning.ttl.report import as_json, text_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status, as of `tuning.trace`: 0; 1 when there are problems in the trace; 2 for what was asked for."""
    options = _parser().parse_args(argv)
    path: Path = options.trace
    try:
        trace, read = read_trace(path, options.format, block_tokens=options.block_size)
        for warning in read.warnings:
            print(f"{path}: {warning}", file=sys.stderr)
        budget_block_s = options.budget_block_s
        if budget_block_s is None:
            horizon_s = float(trace.arrival_s[-1])
            budget_block_s = options.capacity_blocks * horizon_s if horizon_s else 0.0
        fit_options = FitOptions(options.coverage, options.max_groups, options.partial_blocks, options.seed)
        fitted = fit(trace, budget_block_s, fit_options)
        if all(ttl_s == 0 for ttl_s in fitted.plan.ttls_s):
            raise TraceUsageError(_keeps_nothing(fitted, budget_block_s))
        keys = live_keys(path, trace, fitted.roots) if read.format == formats.PARQUET else None
        spec = to_policy_spec(fitted.plan, keys or [root_key(root) for root in fitted.roots], options.eviction)
        report = as_json(
            trace,
            fitted,
            spec,
            on_the_same_trace(fitted),
            on_the_second_half(trace, budget_block_s, fit_options),
        )
        if options.out is not None:
            with replacing(options.out, options.overwrite) as part:
                part.write_text(dump(spec), encoding="ascii")
    except (TraceFileError, TraceUsageError) as error:
        print(error, file=sys.stderr)
        return 2
    except TraceError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        print(json.dumps(report) if options.json else "\n".join(text_lines(report)), flush=True)
    except BrokenPipeError:  # the file is what counts
        stop_printing()
    if options.out is not None and spec.groups and keys is None:
        print(_no_live_keys(options.out, spec.default_ttl_s), file=sys.stderr)
    return 0


def _no_live_keys(out: Path, rest_ttl_s: float | None) -> str:
    """A live store would load such a file without a word: a key that never comes is no mistake there."""
    rest = "no limit" if rest_ttl_s is None else f"{rest_ttl_s:,.3f} s"
    return (
        f"{out} is for the simulator only: the trace has not the keys of a live store, which would find none of the "
        f"groups and give all blocks the time-to-live of the rest, {rest}. For a live store give --max-groups 0, which "
        "makes one time-to-live for all"
    )


def _keeps_nothing(fitted: GroupTtlFit, budget_block_s: float) -> str:
    """Why a policy of these would be useless: each block would go as soon as it is there."""
    least_block_s = least_useful_block_s(fitted.curves)
    if least_block_s is None:
        return "no block of the trace is used again later, so there is no time-to-live to be found"
    least_blocks = math.ceil(1000 * least_block_s / fitted.uses.horizon_s) / 1000
    return (
        f"{budget_block_s:,.6g} block-seconds keep no block until its next use: give --budget-block-s "
        f"{math.ceil(least_block_s)} or more, or --capacity-blocks {least_blocks:.10g} or more for as many on average"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tuning.ttl",
        description="Find the hottest prefix subtrees of a trace, and for each of them and the rest the time-to-live "
        "that gives most hits within a budget of storage. Compares them with one TTL for all and with LRU.",
        epilog="Roots in the policy file are keys of the live store where the trace has them (Parquet with 32-byte "
        "hashes). Else they are the trace's block ids, big-endian in 32 bytes, which mean something to the simulator "
        "only. Example: python -m tuning.ttl --trace conversation.jsonl --capacity-blocks 14563 --out policy.json",
    )
    parser.add_argument("--trace", metavar="FILE", type=Path, required=True, help="requests with block hashes")
    parser.add_argument("--format", choices=("auto", *formats.NAMES), default="auto", help="default: auto")
    parser.add_argument(
        "--block-size", metavar="TOKENS", type=whole(1), help="tokens a block, if the file leaves it open"
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--budget-block-s",
        metavar="B",
        type=above_0_or_inf,
        help="above 0: blocks that are held, times the seconds that they are held for; inf for no limit",
    )
    budget.add_argument(
        "--capacity-blocks",
        metavar="N",
        type=above_0_or_inf,
        help="above 0: the same as the blocks held on average, N times the length of the trace; inf for no limit. "
        "G GiB hold G * 2^30 / (tokens a block * bytes of KV a token) of them",
    )
    parser.add_argument(
        "--coverage",
        metavar="SHARE",
        type=share,
        default=0.9,
        help="of the hits: as many groups as have it together (default: 0.9)",
    )
    parser.add_argument(
        "--max-groups",
        metavar="K",
        type=whole(0),
        default=64,
        help="no more groups than these; 0: one TTL for all (default: 64)",
    )
    parser.add_argument(
        "--partial-blocks",
        choices=get_args(PartialBlocks),
        default="hit",
        help="miss: the last block of a prompt is not stored where its tokens do not fill it (default: hit)",
    )
    parser.add_argument(
        "--eviction",
        choices=("lru", "lfu"),
        default="lru",
        help="of the policy, for what has not expired (default: lru)",
    )
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, help="of the solver's starts (default: 0)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the policy there")
    parser.add_argument("--overwrite", action="store_true", help="replace --out if it is there")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of tables")
    return parser


if __name__ == "__main__":
    sys.exit(status_of(main))
