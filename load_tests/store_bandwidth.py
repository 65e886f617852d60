"""How fast the global store moves KV, beside copying memory and reading plain files on the same machine.

Starts a directory and a node's store in a Ray session of its own, with a disk tier in a new folder below --folder,
which must lie on a real disk and is removed again. In every repeat a chain of --mib MiB

- is pulled from a stand-in for a worker (its copy into parts and its checksums included): DRAM write;
- is fetched, verified, and copied once into an array: DRAM read, beside a copy of as many bytes from array to array;
- is written behind to disk: disk write, beside plain files of the same sizes. Nothing is forced to the disk in either;
- is freed in DRAM, and fetched, verified and copied once more: disk read, beside read() of the plain files into an
  array. Before each read from disk the files' pages are dropped (fsync, posix_fadvise); that they are gone is checked.

What is behind a virtual disk may have a cache of its own, in both. The first repeat warms up and does not count.
Progress goes to stderr; stdout gets a Markdown table and, as its last line, one JSON object.

    python -m load_tests.store_bandwidth --folder ~/tmp --repeats 10 --save store-bandwidth
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv.exit_status import status_of
from load_tests.command_line import add_save_options, save
from load_tests.measured_run import report_progress
from load_tests.page_cache import PagesKeptError, drop_pages
from load_tests.paired_ratio import paired_ratio
from load_tests.run_tables import markdown_table
from load_tests.store_rig import LAYOUT, StoreRig, StoreRigError, local_ray, new_keys

_MIB = 1024 * 1024
_BASELINES = {
    "DRAM write": "memory copy",
    "DRAM read": "memory copy",
    "disk write": "plain write",
    "disk read": "plain read",
}
"""What is measured, and beside what."""


@dataclass(slots=True)
class Rates:
    """Bytes per second of everything that was measured with one size of parts, one value a repeat."""

    part_bytes: int
    samples: dict[str, list[float]] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """One record for each way, with its ratio to its baseline in the same repeat."""
        return [self._row(way, baseline) for way, baseline in _BASELINES.items()]

    def _row(self, way: str, baseline: str) -> dict[str, Any]:
        rates, others = self.samples[way], self.samples[baseline]
        ratio = paired_ratio(list(zip(others, rates, strict=True)))
        return {
            "part_mib": self.part_bytes / _MIB,
            "way": way,
            "gb_per_s": _spread(rates),
            "baseline": baseline,
            "baseline_gb_per_s": _spread(others),
            "ratio": None
            if ratio is None
            else {
                "median": round(ratio.median, 4),
                "low": round(ratio.low, 4),
                "high": round(ratio.high, 4),
                "coverage": round(ratio.coverage, 4),
            },
        }


class PlainFiles:
    """Files of given sizes, written and read without the store."""

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        folder.mkdir()
        self.paths = [folder / str(number) for number in range(len(sizes))]
        self._sizes = sizes
        self._buffer = np.random.default_rng(2).integers(0, 256, sum(sizes), dtype=np.uint8)

    def write(self) -> float:
        """Seconds for new files."""
        for path in self.paths:
            path.unlink(missing_ok=True)
        started_s = time.perf_counter()
        self._each(os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.pwrite)
        return time.perf_counter() - started_s

    def read(self) -> float:
        """Seconds to have all of them in an array."""
        started_s = time.perf_counter()
        self._each(os.O_RDONLY, lambda fd, view, offset: os.preadv(fd, [view], offset))
        return time.perf_counter() - started_s

    def _each(self, flags: int, move: Callable[[int, memoryview, int], int]) -> None:
        start = 0
        for path, size in zip(self.paths, self._sizes, strict=True):
            fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
            try:
                done = 0
                while done < size:
                    count = move(fd, self._buffer[start + done : start + size].data, done)
                    if count == 0:
                        raise StoreRigError(f"{path} ends at byte {done} of {size}")
                    done += count
            finally:
                os.close(fd)
            start += size


def measure(rig: StoreRig, num_blocks: int, repeats: int, scratch: Path) -> Rates:
    """All ways and baselines, once in each repeat; the store goes first in every second one.

    Raises:
        StoreRigError, PagesKeptError, OSError.
    """
    rates = Rates(rig.part_blocks * LAYOUT.block_bytes)
    num_bytes = num_blocks * LAYOUT.block_bytes
    target = _pages(num_blocks)
    source = np.random.default_rng(3).integers(-(2**15), 2**15, target.shape, dtype=np.int16)
    plain: PlainFiles | None = None

    for repeat in range(1 + repeats):
        keys = new_keys(num_blocks)
        times = {"DRAM write": rig.put(keys), "disk write": rig.flush()}
        if plain is None:
            plain = PlainFiles(scratch, [path.stat().st_size for path in rig.files()])

        def dram(keys: list[bytes] = keys, times: dict[str, float] = times) -> None:
            times["DRAM read"] = rig.read(keys, "dram", target)

        def memory(times: dict[str, float] = times) -> None:
            target[...] = 0
            started_s = time.perf_counter()
            np.copyto(target, source)
            times["memory copy"] = time.perf_counter() - started_s

        def disk(keys: list[bytes] = keys, times: dict[str, float] = times) -> None:
            rig.leave_on_disk_only()
            drop_pages(rig.files())
            times["disk read"] = rig.read(keys, "disk", target)

        def files(times: dict[str, float] = times, plain: PlainFiles = plain) -> None:
            times["plain write"] = plain.write()
            drop_pages(plain.paths)
            times["plain read"] = plain.read()

        for first, second in ((dram, memory), (disk, files)):
            for measured in (first, second) if repeat % 2 else (second, first):
                measured()
        rig.forget(keys)
        if repeat:
            for way, seconds in times.items():
                rates.samples.setdefault(way, []).append(num_bytes / seconds)
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m load_tests.store_bandwidth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure (default %(default)s)"
    )
    parser.add_argument(
        "--part-mib", type=int, nargs="+", default=[1, 4, 16], help="sizes of parts in MiB (default 1 4 16)"
    )
    parser.add_argument("--mib", type=int, default=128, help="size of a chain, a multiple of each part (default 128)")
    parser.add_argument("--repeats", type=int, default=10, help="measured repeats (default 10)")
    parser.add_argument("--quick", action="store_true", help="two repeats of 8 MiB in parts of 1 MiB")
    add_save_options(parser)
    arguments = parser.parse_args(arguments_given)
    part_mib, mib, repeats = ([1], 8, 2) if arguments.quick else (arguments.part_mib, arguments.mib, arguments.repeats)
    if repeats < 1 or any(size < 1 or mib < size or mib % size for size in part_mib):
        parser.error("--repeats and --part-mib must be at least 1, and --mib a multiple of every --part-mib")
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder} is no folder: give one that is there")
    results: list[Rates] = []
    try:
        # A store at a time: a chain, with as much again for what is on its way, and the object store's own needs.
        with local_ray((4 * mib + 128) * _MIB), tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            for size in part_mib:
                report_progress(f"parts of {size} MiB: {repeats} repeats of {mib} MiB")
                rig = StoreRig(Path(name, f"store-{size}"), size * _MIB // LAYOUT.block_bytes, (mib + 16) * _MIB)
                results.append(measure(rig, mib * _MIB // LAYOUT.block_bytes, repeats, Path(name, f"plain-{size}")))
                rig.close()
                report_progress(_table(results[-1:]))
    except (StoreRigError, PagesKeptError, OSError) as error:
        report_progress(f"not measured: {error}")
        return 1
    table = _table(results)
    figures = {
        "chain_mib": mib,
        "rates": [row for rates in results for row in rates.rows()],
        "bytes_per_s": [{"part_bytes": rates.part_bytes, **rates.samples} for rates in results],
    }
    if arguments.save:
        save(arguments, "load_tests.store_bandwidth", arguments_given, [("Bandwidth", table)], figures)
    print(table)
    print(json.dumps(figures))
    return 0


def _pages(num_blocks: int) -> NDArray[np.int16]:
    shape = (num_blocks, LAYOUT.num_layers, LAYOUT.num_kv_heads, 2, LAYOUT.block_tokens, LAYOUT.head_dim)
    return np.zeros(shape, np.int16)


def _spread(rates: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(rates) / 1e9, 4),
        "min": round(min(rates) / 1e9, 4),
        "max": round(max(rates) / 1e9, 4),
    }


def _table(results: Sequence[Rates]) -> str:
    def cell(spread: dict[str, float]) -> str:
        return f"{spread['median']:.2f} ({spread['min']:.2f}-{spread['max']:.2f})"

    rows = []
    for record in (row for rates in results for row in rates.rows()):
        ratio = record["ratio"]
        rows.append(
            (
                f"{record['part_mib']:g}",
                record["way"],
                cell(record["gb_per_s"]),
                record["baseline"],
                cell(record["baseline_gb_per_s"]),
                *(
                    ("-", "-", "-")
                    if ratio is None
                    else (
                        f"{ratio['median']:.2f}",
                        f"{ratio['low']:.2f}-{ratio['high']:.2f}",
                        f"{100 * ratio['coverage']:.0f} %",
                    )
                ),
            )
        )
    return markdown_table(("part, MiB", "way", "GB/s", "beside", "GB/s ", "ratio", "interval", "coverage"), rows)


if __name__ == "__main__":
    sys.exit(status_of(main))
