"""How long a simulation takes, on one core: `python -m load_tests.simulator_speed --trace FILE` or `--synthetic N`.

A full configuration: four instances, a DRAM and a disk tier, times-to-live. The command line says how many of a kind
there are and how fast requests come; beside seconds it prints the process's peak memory, the trace's own included.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Final

from kv.exit_status import status_of
from kv.policy.policy_file import PolicySpec
from tuning.figure_file import find_figure_file, read_figure_file
from tuning.hardware_profile import HardwareProfile
from tuning.model_config import read_model_shape
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace

HARDWARE: Final = Path(__file__).parents[1] / "tuning" / "hardware"
DAY_S: Final = 86_400


def make_settings(mode: str, instances: int, hardware: HardwareProfile, ttl_s: float | None) -> SimulationSettings:
    """A deployment of 1 TiB of DRAM and 4 TiB of disk; half of the instances prefill where that is apart."""
    return SimulationSettings(
        mode="monolithic" if mode == "monolithic" else "static",
        prefill_instances=max(1, instances // 2),
        decode_instances=max(1, instances - instances // 2),
        monolithic_instances=instances,
        link_bytes_per_s=hardware.host_link_bytes_per_s,
        dram_bytes=1 << 40,
        dram_read_bytes_per_s=100e9,
        dram_write_bytes_per_s=100e9,
        disk_bytes=4 << 40,
        disk_read_bytes_per_s=6e9,
        disk_write_bytes_per_s=3e9,
        disk_iops=100_000,
        policy=PolicySpec(default_ttl_s=ttl_s),
        partial_blocks="hit",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.simulator_speed",
        description=__doc__,
        epilog="example: python -m load_tests.simulator_speed --synthetic 100000",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace file")
    source.add_argument("--synthetic", type=int, metavar="N", help="N generated requests, at a million a day")
    parser.add_argument("--block-tokens", type=int, default=64, help="of the generated requests")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="requests come so many times as fast")
    parser.add_argument("--mode", choices=("static", "monolithic"), default="static")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--ttl-s", type=float, help="time-to-live in both tiers; none if not given")
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--hardware", default="a100-80g")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    trace = _trace(options.trace, options.synthetic, options.block_tokens).scaled(options.rate_factor)
    hardware = read_figure_file(find_figure_file(options.hardware, HARDWARE), HardwareProfile)
    timing = Timing(read_model_shape(options.model), hardware)
    settings = make_settings(options.mode, options.instances, hardware, options.ttl_s)
    seconds = []
    for _ in range(options.repeats):
        begin_s = time.process_time()
        result = simulate(trace, timing, settings)
        seconds.append(time.process_time() - begin_s)
    median_s = statistics.median(seconds)
    figures = result.summary()
    print(
        f"{len(trace):,} requests, {len(trace.block_ids):,} blocks of {trace.num_ids:,}, {result.num_events:,} events"
    )
    print(f"CPU seconds: {', '.join(f'{second:.2f}' for second in seconds)}; median {median_s:.2f}")
    print(f"{len(trace) / median_s:,.0f} requests/s, {len(trace.block_ids) / median_s:,.0f} blocks/s")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20):.2f} GiB")
    for name in ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "block_hit_ratio", "makespan_s"):
        print(f"{name}: {figures[name]:.4f}")


def _trace(file: Path | None, num_requests: int | None, block_tokens: int) -> Trace:
    if file is not None:
        return read_trace(file)[0]
    count = num_requests or 1
    traffic = SyntheticTraffic(
        seed=1, requests=count, requests_per_s=1e6 / DAY_S, block_tokens=block_tokens, prefixes=2000
    )
    return generate(traffic)


if __name__ == "__main__":
    sys.exit(status_of(main))
