"""The job's command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from migrate.dispatch import POLICIES
from tuning.deployment.objectives import Statistic
from tuning.hardware_profile import hardware_names
from tuning.job.axes import MAX_GIB
from tuning.job.choice import Rule
from tuning.known_models import KNOWN_CONFIGS
from tuning.option_types import above_0, between, whole
from tuning.pareto.methods import METHODS
from tuning.price_book import price_book_names
from tuning.simulator.settings import Mode
from tuning.trace import formats
from tuning.trace.trace import PartialBlocks

_EPILOG = """what an AXIS may be:
  512             one whole number: fixed
  0:2048:512/16   a range LOW:HIGH:COARSE/FINE: searched, first at every COARSE (0, 512, 1024, 1536, 2048), then between
                  them down to steps of FINE. HIGH - LOW must be a multiple of COARSE, and COARSE one of FINE
  1:8:1           a range LOW:HIGH:STEP, with one step for both
  none            for --ttl-s: no limit
what a NAME[,NAME] may be:
  lru             one name: fixed
  lru,lfu         names with commas: searched

example:
  python -m tuning.job --trace conversation_trace.jsonl --model qwen3-8b --hardware a100-80g --prices aws-us-east-1 \\
    --prefill-instances 4 --decode-instances 2 --rate-factor 0.45 --disk-gib 0:4096:1024/64 --disk-class gp3-2000 \\
    --slo-ttft-s 20 --base-config base.yaml --out study

exit status: 0 a configuration was chosen; 1 no point keeps the limits; 2 something given can't be used;
130 interrupted: the same command goes on from there. docs/tuning-job.md has more."""


def _path(text: str) -> Path:
    """A variable of the shell that is not set gives an empty text, which would mean the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("'' is not allowed: give a name")
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tuning.job",
        description="Search for sizes of the KV cache (and numbers of instances) that nothing else beats in time to "
        "first token, throughput and cost at once, by simulating a trace. Writes the study, the front, a policy of "
        "times-to-live and a configuration to serve with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    given = parser.add_argument_group("what is given")
    given.add_argument("--trace", type=_path, required=True, metavar="FILE", help="requests with block hashes")
    given.add_argument("--trace-format", choices=("auto", *formats.NAMES), default="auto", help="default: auto")
    given.add_argument(
        "--block-size", type=whole(1), metavar="TOKENS", help="tokens a block, if the file leaves it open"
    )
    given.add_argument(
        "--rate-factor",
        type=between(1e-6, 1e6),
        default=1.0,
        metavar="F",
        help="requests arrive F times as often: below 1 where the trace is of more machines than are simulated "
        "(default 1)",
    )
    given.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help=f"{', '.join(sorted(KNOWN_CONFIGS))}; or a config.json or its folder",
    )
    given.add_argument("--dtype", help="of weights and KV; default: the model's own")
    given.add_argument(
        "--hardware", required=True, metavar="NAME", help=f"{', '.join(hardware_names())}; or a YAML file"
    )
    given.add_argument(
        "--prices", required=True, metavar="NAME", help=f"{', '.join(price_book_names())}; or a YAML file"
    )
    given.add_argument(
        "--partial-blocks",
        choices=get_args(PartialBlocks),
        help="whether a prompt's last block can hit where it is not full (default: miss for bailian, else hit)",
    )
    axes = parser.add_argument_group("the deployment: fixed values and axes")
    axes.add_argument("--mode", choices=get_args(Mode), default="static", help="default: static")
    axes.add_argument("--instances", metavar="AXIS", help="of mode monolithic (default 1)")
    axes.add_argument("--prefill-instances", metavar="AXIS", help="of mode static (default 1)")
    axes.add_argument("--decode-instances", metavar="AXIS", help="of mode static (default 1)")
    axes.add_argument(
        "--dram-gib", default="0:2048:512/16", metavar="AXIS", help="of all instances together; default %(default)s"
    )
    axes.add_argument("--disk-gib", metavar="AXIS", help="of all instances together; default 0: none")
    axes.add_argument("--disk-class", metavar="NAME[,NAME]", help="of the prices; several are searched")
    axes.add_argument("--ttl-s", default="none", metavar="AXIS", help="default none: no limit")
    axes.add_argument("--eviction", default="lru", metavar="NAME[,NAME]", help="lru, lfu or both (default lru)")
    axes.add_argument("--dispatch", choices=tuple(POLICIES), default="load_aware", help="default: load_aware")
    axes.add_argument(
        "--max-batch-tokens", type=whole(1), default=8192, metavar="N", help="in a step; default %(default)s"
    )
    axes.add_argument(
        "--max-running-requests", type=whole(1), default=256, metavar="N", help="on an instance; default %(default)s"
    )
    axes.add_argument(
        "--baseline-dram-gib",
        type=whole(0, MAX_GIB),
        default=1024,
        metavar="GIB",
        help="what results are compared with, without disk or time-to-live (default %(default)s)",
    )
    goals = parser.add_argument_group("goals")
    goals.add_argument("--ttft", choices=get_args(Statistic), default="mean", help="to be made small (default mean)")
    goals.add_argument("--slo-ttft-s", type=above_0, metavar="S", help="limit of the time to first token, in seconds")
    goals.add_argument(
        "--slo-tpot-s",
        type=above_0,
        metavar="S",
        help="limit of the time for an output token after the first, in seconds",
    )
    goals.add_argument("--slo", choices=get_args(Statistic), default="p99", help="what must keep them (default p99)")
    goals.add_argument(
        "--budget-per-hour",
        type=above_0,
        metavar="PRICE",
        help="limit of what an hour of all devices, DRAM and disk costs, in the currency of --prices",
    )
    goals.add_argument(
        "--choose",
        choices=get_args(Rule),
        help="which point of the front to write a configuration for (default: cheapest with a limit of times, fastest "
        "with a budget alone, else the knee)",
    )
    search = parser.add_argument_group("the search")
    search.add_argument("--evaluations", type=whole(1, 10**6), default=60, metavar="N", help="at most (default 60)")
    search.add_argument("--seed", type=whole(0, 2**32 - 1), default=1, help="default 1")
    search.add_argument("--method", choices=METHODS, default="pareto", help="default: pareto")
    where = search.add_mutually_exclusive_group()
    where.add_argument(
        "--local", type=whole(1, 1024), metavar="N", help="so many processes here (default: one for each CPU)"
    )
    where.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="tasks in this Ray cluster (default where RAY_ADDRESS is set, as in `ray job submit`)",
    )
    search.add_argument("--ray-cpus", type=above_0, default=1.0, metavar="N", help="that a task sets aside (default 1)")
    search.add_argument("--no-progress", action="store_true", help="no bar")
    out = parser.add_argument_group("what is written")
    out.add_argument("--out", type=_path, required=True, metavar="FOLDER", help="made when it is not there")
    out.add_argument(
        "--base-config",
        type=_path,
        metavar="FILE",
        help="Serve configuration with the model, engine and devices to serve with; without one the defaults",
    )
    out.add_argument(
        "--nodes",
        type=whole(1, 10**6),
        default=1,
        metavar="N",
        help="that the store is spread over, evenly: sizes in the configuration are each node's (default 1)",
    )
    return parser
