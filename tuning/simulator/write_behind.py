"""What gets from DRAM to the disk, and when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuning.simulator.events import STORED, EventQueue
from tuning.simulator.lane import submit_through
from tuning.simulator.run_table import without
from tuning.simulator.settings import SimulationSettings

if TYPE_CHECKING:
    from tuning.simulator.store import Store


class WriteBehind:
    """Copies to the disk what is new in DRAM, or what is used again, as `DiskAdmission` says: one queue, in order.

    What waits is no longer than the settings allow, and is written also if it leaves DRAM meanwhile, as the live store
    writes what has to leave before its turn.
    """

    def __init__(self, settings: SimulationSettings, store: Store, events: EventQueue) -> None:
        self.refused_blocks = 0
        """That found the queue full."""
        self._admission = settings.disk_admission
        self._limit_bytes = settings.disk_write_queue_bytes
        self._store = store
        self._events = events
        self._waiting: set[int] = set()
        self._waiting_bytes = 0
        self._jobs: dict[int, tuple[Sequence[int], list[tuple[int, int]], int, int]] = {}
        self._next_job = 0

    def stored(self, chain: Sequence[int], stop: int, num_nameless: int, now_s: float) -> None:
        """`chain[:stop]` is in DRAM now, and so are blocks that nobody will ask for."""
        if self._admission.admits(num_uses=0):
            self._enqueue(chain, self._not_on_disk(chain, stop), num_nameless, now_s)

    def used(self, chain: Sequence[int], stop: int, now_s: float) -> None:
        """`chain[:stop]` was found. Where all is written once it is stored, that has been done."""
        if self._admission.admits(num_uses=1) and not self._admission.admits(num_uses=0):
            self._enqueue(chain, self._not_on_disk(chain, stop), 0, now_s)

    def _not_on_disk(self, chain: Sequence[int], stop: int) -> list[tuple[int, int]]:
        """Stretches (start, stop) of `chain[:stop]` that are neither on disk nor waiting."""
        disk = self._store.disk
        stretches: list[tuple[int, int]] = []
        start = 0
        while start < stop:
            end = disk.matched(chain, start, stop)
            start = disk.missing(chain, end, stop)
            stretches += without(chain, end, start, self._waiting)
        return stretches

    def _enqueue(self, chain: Sequence[int], stretches: list[tuple[int, int]], num_nameless: int, now_s: float) -> None:
        num_blocks = num_nameless
        for start, stop in stretches:
            num_blocks += stop - start
        if not num_blocks:
            return
        store = self._store
        num_bytes = num_blocks * store.block_bytes
        if self._waiting_bytes + num_bytes > self._limit_bytes:
            self.refused_blocks += num_blocks
            return
        self._waiting_bytes += num_bytes
        for start, stop in stretches:
            self._waiting.update(chain[start:stop])
        store.moved.dram_to_disk += num_bytes
        _, end_s = submit_through(store.dram_read, store.disk_write, now_s, num_bytes)
        self._jobs[self._next_job] = chain, stretches, num_nameless, num_bytes
        self._events.schedule(end_s, STORED, self._written, self._next_job)
        self._next_job += 1

    def _written(self, now_s: float, job: int) -> None:
        chain, stretches, num_nameless, num_bytes = self._jobs.pop(job)
        disk = self._store.disk
        self._waiting_bytes -= num_bytes
        for start, stop in stretches:
            self._waiting.difference_update(chain[start:stop])
            disk.put_missing(chain, start, stop, now_s)
        if num_nameless:
            disk.put_nameless(num_nameless, now_s)
