"""How long our simulator takes beside Vidur, on the same arrivals and lengths:

    python -m load_tests.beside_vidur --trace FILE --vidur-python PYTHON --repository FOLDER [--wheel FOLDER]

Vidur (https://github.com/microsoft/vidur) gets its best case: metrics off, one process, times of operations from tables
that are filled beforehand (`vidur_run.py`, which says what is timed). Ours is timed with its figures; with
`--vidur-metrics` so is Vidur. Both sides simulate Llama-3-8B on A100s, prompts in chunks beside decodes, with the same
limits of a step, the same room for KV and the same times of operations, so that they make about the same steps; the
table shows what came out. Traces that Vidur replays say nothing of shared prefixes, so ours runs without any reuse, and
once more with all that it has: prefixes on the instance, a DRAM and a disk tier, times-to-live.

Sides run in turns, each on one core; what counts is CPU time.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from kv.exit_status import status_of
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.paired_ratio import paired_ratio
from load_tests.run_tables import markdown_table, number
from load_tests.simulator_speed import make_settings
from load_tests.vidur_run import DATE, Times
from tuning.hardware_profile import read_hardware
from tuning.model_config import read_model_shape
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace

RUNNER: Final = Path(__file__).with_name("vidur_run.py")
MODEL, HARDWARE = "llama-3.1-8b", "a100-80g"
"""Of the shape that Vidur calls Llama-3-8B; the longer context makes no difference to sizes and times."""
OURS = ("without reuse", "with everything")
TTL_S: Final = 600.0
_REPOSITORY_COLUMNS: Final = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
_WHEEL_COLUMNS: Final = ("Time", "PromptTokenCount", "CompletionTokenCount", "Date")


class VidurError(Exception):
    """Vidur did not run to its end."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.beside_vidur",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE")
    parser.add_argument("--vidur-python", required=True, metavar="PYTHON", help="that has what Vidur imports")
    parser.add_argument("--repository", type=Path, metavar="FOLDER", help="Vidur's repository; holds `vidur`")
    parser.add_argument("--wheel", type=Path, metavar="FOLDER", help="PyPI's vidur 0.0.26, unpacked")
    parser.add_argument(
        "--vidur-metrics", action="store_true", help="let Vidur gather its own (the wheel writes them, too)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="the first N only")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="requests come so many times as fast")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    parser.add_argument("--chunk-tokens", type=int, default=8192, metavar="N", help="of a step (default 8192)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="N", help="sequences (default 256)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    if arguments.repository is None and arguments.wheel is None:
        parser.error("give --repository, --wheel or both")

    trace = read_trace(arguments.trace)[0]
    trace = trace.head(arguments.requests or len(trace)).scaled(arguments.rate_factor)
    timing = Timing(read_model_shape(MODEL), read_hardware(HARDWARE))
    runs: dict[str, list[dict[str, float]]] = {}
    try:
        for turn in range(arguments.repeats):
            for side, figures in one_turn(arguments, trace, timing):
                runs.setdefault(side, []).append(figures)
                report_progress(f"turn {turn + 1}, {side}: {figures['cpu_s']:.2f} s")
    except VidurError as error:
        print(error, file=sys.stderr)
        return 1
    tables = [("What was simulated, and for how long", side_table(runs)), ("Ratios", ratio_table(runs))]
    if arguments.save:
        save(arguments, "load_tests.beside_vidur", arguments_given, tables, runs)
    print("\n\n".join(table for _, table in tables))
    return 0


def one_turn(arguments: argparse.Namespace, trace: Trace, timing: Timing) -> Iterator[tuple[str, dict[str, float]]]:
    """Each side once."""
    limits: dict[str, Any] = {
        "max_batch_tokens": arguments.chunk_tokens,
        "max_running_requests": min(arguments.batch_size, arguments.chunk_tokens),
    }
    plain = SimulationSettings(
        mode="monolithic",
        monolithic_instances=arguments.replicas,
        local_prefix_cache=False,
        store_answers=False,
        dispatch="round_robin",
        **limits,
    )
    whole = dataclasses.replace(make_settings("monolithic", arguments.replicas, timing.hardware, TTL_S), **limits)
    for name, each, settings in zip(OURS, (without_reuse(trace), trace), (plain, whole), strict=True):
        yield f"ours, {name}", our_run(each, timing, settings)
    for version, folder in (("repository", arguments.repository), ("wheel", arguments.wheel)):
        if folder is not None:
            job = vidur_job(trace, timing, limits, arguments.replicas) | {
                "version": version,
                "folder": str(folder.absolute()),
                "metrics": arguments.vidur_metrics,
            }
            yield f"Vidur, {version}", vidur_run(arguments.vidur_python, trace, job)


def our_run(trace: Trace, timing: Timing, settings: SimulationSettings) -> dict[str, float]:
    begin_s = time.process_time()
    figures = simulate(trace, timing, settings).summary()
    cpu_s = time.process_time() - begin_s
    return {"cpu_s": cpu_s, "completed": figures["completed_requests"]} | {
        name: figures[name] for name in ("makespan_s", "ttft_mean_s", "e2e_mean_s")
    }


def vidur_run(python: str, trace: Trace, job: dict[str, Any]) -> dict[str, float]:
    """One simulation in a process of its own.

    Raises:
        VidurError: it failed, or left requests.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("trace.csv", "job.json", "result.json")}
        write_vidur_trace(files["trace.csv"], trace)
        job = job | {"trace": str(files["trace.csv"]), "result": str(files["result.json"])}
        files["job.json"].write_text(json.dumps(job), encoding="utf-8")
        # Isolated: names of modules beside the program are no packages' names.
        ended = subprocess.run(
            [python, "-I", str(RUNNER), str(files["job.json"])], cwd=folder, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            raise VidurError(f"Vidur ({job['version']}) ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
        figures: dict[str, float] = json.loads(files["result.json"].read_text(encoding="utf-8"))
    if figures["completed"] != len(trace):
        raise VidurError(f"Vidur ({job['version']}) completed {figures['completed']} of {len(trace)} requests")
    return figures


def vidur_job(trace: Trace, timing: Timing, limits: dict[str, Any], replicas: int) -> dict[str, Any]:
    """What `vidur_run.simulate` takes, but for files."""
    layer_ms = 1e3 / timing.model.num_layers
    return {
        "native": True,
        "replicas": replicas,
        "max_tokens": int((trace.input_tokens + np.maximum(trace.output_tokens, 1)).max()),
        "pool_tokens": timing.kv_pool_tokens(),
        "chunk_tokens": limits["max_batch_tokens"],
        "batch_size": limits["max_running_requests"],
        "times": dataclasses.asdict(
            Times(
                token_ms=timing.prefill_token_s * layer_ms,
                weights_ms=timing.weights_read_s * layer_ms,
                square_ms=timing.square_s * layer_ms,
                context_token_ms=timing.context_token_s * layer_ms,
            )
        ),
    }


def write_vidur_trace(path: Path, trace: Trace) -> None:
    """With the columns that either version reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow((*_REPOSITORY_COLUMNS, *_WHEEL_COLUMNS))
        columns = (trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist())
        writer.writerows((*row, *row, DATE) for row in zip(*columns, strict=True))


def without_reuse(trace: Trace) -> Trace:
    """The same requests with no block known."""
    return dataclasses.replace(
        trace,
        block_tokens=None,
        block_ids=np.zeros(0, dtype=np.int64),
        block_offsets=np.zeros(len(trace) + 1, dtype=np.int64),
    )


def side_table(runs: dict[str, list[dict[str, float]]]) -> str:
    rows = []
    for side, repeats in runs.items():
        seconds = [each["cpu_s"] for each in repeats]
        median_s, first = statistics.median(seconds), repeats[0]
        rows.append(
            (
                side,
                f"{number(median_s)} ({number(min(seconds))}-{number(max(seconds))})",
                number(first["completed"] / median_s),
                *(number(first.get(name)) for name in ("batches", "makespan_s", "ttft_mean_s", "e2e_mean_s")),
            )
        )
    columns = ("side", "CPU seconds", "requests/s", "batches", "makespan s", "mean TTFT s", "mean end-to-end s")
    return markdown_table(columns, rows)


def ratio_table(runs: dict[str, list[dict[str, float]]]) -> str:
    """Vidur's CPU seconds over ours, turn by turn."""
    rows = []
    for theirs in (side for side in runs if side.startswith("Vidur")):
        for ours in (f"ours, {name}" for name in OURS):
            ratio = paired_ratio(
                [(each["cpu_s"], other["cpu_s"]) for each, other in zip(runs[ours], runs[theirs], strict=True)]
            )
            if ratio is not None:
                rows.append((theirs, ours, f"{ratio.median:.1f}", f"{ratio.low:.1f} to {ratio.high:.1f}"))
    return markdown_table(("", "beside", "times the CPU seconds", "interval"), rows)


if __name__ == "__main__":
    sys.exit(status_of(main))
