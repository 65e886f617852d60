"""Memory of the server's processes over a run, by process label."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from load_tests.processes import ServerProcesses, process_label, server_rows
from load_tests.trend import Trend, second_half, trend


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of all processes of one label at one moment, in bytes. `uss_bytes` is None without permission to read."""

    time_s: float
    rss_bytes: int
    uss_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryGrowth:
    """How one label's memory went over the second half of the samples."""

    first: MemorySample
    last: MemorySample
    rss: Trend | None
    uss: Trend | None


class MemoryMeter:
    """Samples while it is entered, in a thread, and once more at the end."""

    def __init__(self, wanted: ServerProcesses, interval_s: float) -> None:
        self._wanted = wanted
        self._interval_s = interval_s
        self._stop = threading.Event()
        self.samples: dict[str, list[MemorySample]] = defaultdict(list)

    def __enter__(self) -> MemoryMeter:
        self._take()
        self._thread = threading.Thread(target=self._keep_sampling, name="memory-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._take()

    def _keep_sampling(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        for label, sample in read_memory(self._wanted).items():
            self.samples[label].append(sample)


def read_memory(wanted: ServerProcesses) -> dict[str, MemorySample]:
    """The memory of the server's processes now, summed by label."""
    now_s = time.monotonic()
    samples: dict[str, MemorySample] = {}
    for row in server_rows(wanted):
        try:
            process = psutil.Process(row.pid)
            rss_bytes = int(process.memory_info().rss)
            uss_bytes = _uss_bytes(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        label = process_label(row.command)
        before = samples.get(label, MemorySample(now_s, 0, 0))
        both_known = before.uss_bytes is not None and uss_bytes is not None
        samples[label] = MemorySample(
            now_s,
            before.rss_bytes + rss_bytes,
            (before.uss_bytes or 0) + (uss_bytes or 0) if both_known else None,
        )
    return samples


def _uss_bytes(process: psutil.Process) -> int | None:
    try:
        return int(process.memory_full_info().uss)
    except psutil.AccessDenied:
        return None


def growth(samples: Sequence[MemorySample]) -> MemoryGrowth:
    """The trends of one label's samples, which are in order of time and at least one."""
    rss = [(sample.time_s, float(sample.rss_bytes)) for sample in samples]
    uss = [(sample.time_s, float(sample.uss_bytes)) for sample in samples if sample.uss_bytes is not None]
    return MemoryGrowth(samples[0], samples[-1], trend(second_half(rss)), trend(second_half(uss)))
