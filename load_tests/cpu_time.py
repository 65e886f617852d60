"""CPU seconds of the server's processes over a run, and how much of the machine others used meanwhile.

The kernel's counters are read at the start, once a second and at the end. A process that ended in between is counted
up to when it was last seen; what it used after that, and processes too short-lived to be seen, come in through the
counter of reaped children of their parent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil  # type: ignore[import-untyped]

from load_tests.processes import ServerProcesses, process_label, server_rows

LOAD_GENERATOR = "load generator"
_CLOCK_GRAIN_S = 0.02
"""Start times are known to a kernel tick of 10 ms, and not from quite the same zero."""


@dataclass(frozen=True, slots=True)
class CpuSample:
    """One process's counters at one moment. `reaped_s` is what its children used that ended and were waited for."""

    key: tuple[int, float]
    parent_pid: int
    label: str
    own_s: float
    reaped_s: float


@dataclass(frozen=True, slots=True)
class MachineCpu:
    """The machine's CPU time since boot, in seconds summed over cores. Stolen time counts as busy."""

    busy_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU time between two moments."""

    by_label_s: dict[str, float]
    """Includes the load generator's own, under `LOAD_GENERATOR`."""
    machine: MachineCpu
    server_known: bool

    @property
    def foreign_share(self) -> float | None:
        """Share (0 to 1) of the machine's CPU time used by none of the labelled processes; None when the server's
        processes are not known, for then they cannot be told from others."""
        if not self.server_known or self.machine.total_s <= 0:
            return None
        return max(0.0, self.machine.busy_s - sum(self.by_label_s.values())) / self.machine.total_s


class CpuLedger:
    """Adds up samples. Pure: the samples and the start time come in as arguments."""

    def __init__(self, started_s: float, samples: Iterable[CpuSample]) -> None:
        self._started_s = started_s
        self._first: dict[tuple[int, float], CpuSample] = {}
        self._last: dict[tuple[int, float], CpuSample] = {}
        self._alive: set[tuple[int, float]] = set()
        self._take(samples, all_used_before=True)

    def observe(self, samples: Iterable[CpuSample]) -> None:
        """All of the server's processes as they are now."""
        self._take(samples, all_used_before=False)

    def _take(self, samples: Iterable[CpuSample], *, all_used_before: bool) -> None:
        self._alive = set()
        for sample in samples:
            if sample.key not in self._first:
                born_in_run = not all_used_before and sample.key[1] >= self._started_s - _CLOCK_GRAIN_S
                self._first[sample.key] = (
                    CpuSample(sample.key, sample.parent_pid, sample.label, 0.0, 0.0) if born_in_run else sample
                )
            self._last[sample.key] = sample
            self._alive.add(sample.key)

    def seconds_by_label(self) -> dict[str, float]:
        """CPU seconds since the start, by the label that each process had last."""
        ended_children: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for key, sample in self._last.items():
            if key not in self._alive:
                ended_children[sample.parent_pid].append(key)

        def lifetime_s(key: tuple[int, float]) -> float:
            """What the parent's counter of reaped children grew by when this ended process was waited for, as far as
            samples tell."""
            last = self._last[key]
            return last.own_s + max(last.reaped_s, sum(map(lifetime_s, children_of(key))))

        def children_of(key: tuple[int, float]) -> list[tuple[int, float]]:
            # Younger than the parent: a pid that is used again must not make a process its own ancestor.
            return [child for child in ended_children[key[0]] if child[1] >= key[1] and child != key]

        by_label: dict[str, float] = defaultdict(float)
        for key, last in self._last.items():
            first = self._first[key]
            unseen_s = last.reaped_s - first.reaped_s - sum(map(lifetime_s, children_of(key)))
            by_label[last.label] += last.own_s - first.own_s + max(0.0, unseen_s)
        return dict(by_label)


class CpuMeter:
    """Measures while it is entered, in a thread; `usage` is there afterwards."""

    def __init__(self, wanted: ServerProcesses, interval_s: float = 1.0) -> None:
        self._wanted = wanted
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._usage: CpuUsage | None = None

    @property
    def usage(self) -> CpuUsage:
        if self._usage is None:
            raise RuntimeError("the CPU meter still runs, or never ran")
        return self._usage

    def __enter__(self) -> CpuMeter:
        self._machine_at_start = read_machine_cpu()
        self._own_at_start_s = time.process_time()
        self._ledger = CpuLedger(time.time(), read_cpu_samples(self._wanted))
        self._thread = threading.Thread(target=self._observe, name="cpu-meter", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        samples = read_cpu_samples(self._wanted)
        self._ledger.observe(samples)
        by_label_s = self._ledger.seconds_by_label()
        by_label_s[LOAD_GENERATOR] = time.process_time() - self._own_at_start_s
        now = read_machine_cpu()
        self._usage = CpuUsage(
            by_label_s,
            MachineCpu(now.busy_s - self._machine_at_start.busy_s, now.total_s - self._machine_at_start.total_s),
            server_known=len(by_label_s) > 1,
        )

    def _observe(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._ledger.observe(read_cpu_samples(self._wanted))


def read_cpu_samples(wanted: ServerProcesses) -> list[CpuSample]:
    """The counters of the server's processes as they are now."""
    samples = []
    for row in server_rows(wanted):
        try:
            times = psutil.Process(row.pid).cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        samples.append(
            CpuSample(
                row.key,
                row.parent_pid,
                process_label(row.command),
                times.user + times.system,
                times.children_user + times.children_system,
            )
        )
    return samples


def parse_machine_cpu(stat: str, ticks_per_s: int) -> MachineCpu:
    """Reads the text of `/proc/stat`: its first line is `cpu user nice system idle iowait irq softirq steal ...` in
    ticks. Guest time, which follows, is in user and nice already."""
    name, *fields = stat.split("\n", 1)[0].split()
    if name != "cpu" or len(fields) < 8:
        raise ValueError(f"/proc/stat begins with {stat[:80]!r}; expected 'cpu' and at least 8 numbers")
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) / ticks_per_s for field in fields[:8])
    busy_s = user + nice + system + irq + softirq + steal
    return MachineCpu(busy_s, busy_s + idle + iowait)


def read_machine_cpu() -> MachineCpu:
    return parse_machine_cpu(Path("/proc/stat").read_text(), os.sysconf("SC_CLK_TCK"))
