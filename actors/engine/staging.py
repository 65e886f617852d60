"""Copies between a device's pages and host memory beside its computing: pinned buffers, side streams, events.

A copy between a device and ordinary host memory holds up both: the host waits, and the copy queues behind all that is
being computed. So every copy goes through pinned buffers, in slices of one buffer at most, on a stream of its own for
each direction:

    read    pages -> gathered on the device -> pinned | event | host waits for it -> payload
    write   payload -> pinned -> device -> scattered to pages | event | compute, or the host, waits for it

What must wait for what, and by which event:

- A read waits for the step that wrote the pages, and a write for all steps that were given to the device before its
  blocks were allocated: another request's kernels may still be using them, though the host is done with it. Both by an
  event that `computed` recorded on the stream of the steps. The stream waits, the host does not.
- A step that reads written pages waits for the event that `write` returns. A stream keeps its order, so that the event
  of one write stands for all writes queued before it.
- A buffer, in pinned memory or on the device, is used again when the event behind its last use has been reached.

Nothing is allocated in a copy: buffers are taken once, on the stream that uses them, and the pages are kept for both
streams. So memory that is still in use on a side stream is never handed to somebody else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from actors.engine.device_event import DeviceEvent
from actors.engine.device_streams import Streams

NUM_SLOTS = 8
"""Buffers for each direction."""

SLOT_BYTES = 4 << 20
"""Of pages in a buffer. A part of 16 MiB takes four, so that the host copies one slice while the device copies the
next; less would not fill the bus."""


@dataclass(slots=True, eq=False)
class _Slot:
    """What one slice needs. Whoever took it owns all of it until it is given back."""

    pinned: torch.Tensor
    """int64 [pages, words] of host memory"""
    pinned_index: torch.Tensor
    """int64 [pages]"""
    gathered: torch.Tensor
    """The same as `pinned`, on the device"""
    index: torch.Tensor
    """The same as `pinned_index`, on the device"""
    in_use: DeviceEvent | None = None
    """Until here the device uses its buffers."""


class StagedCopies:
    """A `PageCopies` over `pages` [pages, words] int64 on a device. Any number of threads may read and write at a
    time, as long as no page of one copy is written by another. `computed` is called in the thread of the steps.

    Takes `num_slots * slot_bytes` of pinned memory and as much of the device's, for each direction.
    """

    def __init__(
        self, pages: torch.Tensor, streams: Streams, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES
    ) -> None:
        self._pages = pages
        self._streams = streams
        # The pages' first contents, too, were given to the device and may not be there yet.
        self.mark: DeviceEvent = streams.record()
        self._reads = _Ring(pages, streams, num_slots, slot_bytes)
        self._writes = _Ring(pages, streams, num_slots, slot_bytes)

    def computed(self) -> DeviceEvent:
        """See PageCopies."""
        self.mark = self._streams.record()
        return self.mark

    @torch.inference_mode()
    def read(self, index: torch.Tensor, target: torch.Tensor, after: DeviceEvent | None) -> None:
        """See PageCopies."""
        _check_rows(index, target)
        ring = self._reads
        ring.begin_after(self.mark if after is None else after)
        queued: deque[tuple[_Slot, slice]] = deque()
        try:
            for rows in ring.slices(len(index)):
                # Whoever has buffers and lacks another empties one of its own first. So nobody waits for a buffer
                # while others wait for his.
                while (slot := ring.take_free() if queued else ring.take()) is None:
                    self._empty(queued, target)
                queued.append((slot, rows))
                self._gather(slot, index[rows])
            while queued:
                self._empty(queued, target)
        finally:
            for slot, _ in queued:
                ring.give_back(slot)

    @torch.inference_mode()
    def write(self, index: torch.Tensor, source: torch.Tensor, after: DeviceEvent | None) -> DeviceEvent:
        """See PageCopies. `source` has been read when it returns."""
        _check_rows(index, source)
        ring = self._writes
        ring.begin_after(self.mark if after is None else after)
        try:
            for rows in ring.slices(len(index)):
                slot = ring.take()
                try:
                    self._scatter(slot, index[rows], source[rows])
                finally:
                    ring.give_back(slot)
        except BaseException:
            ring.record().synchronize()  # the pages are the caller's again: nothing may arrive in them any more
            raise
        return ring.record()

    def _gather(self, slot: _Slot, index: torch.Tensor) -> None:
        """Queues the copy of the pages of `index` to the slot's pinned memory."""
        num_pages = len(index)
        slot.pinned_index[:num_pages].copy_(index)
        with self._reads.queueing(slot):
            slot.index[:num_pages].copy_(slot.pinned_index[:num_pages], non_blocking=True)
            torch.index_select(self._pages, 0, slot.index[:num_pages], out=slot.gathered[:num_pages])
            slot.pinned[:num_pages].copy_(slot.gathered[:num_pages], non_blocking=True)

    def _empty(self, queued: deque[tuple[_Slot, slice]], target: torch.Tensor) -> None:
        """Waits for the slice that was queued first, copies it to its place, and gives its buffers back."""
        slot, rows = queued[0]
        if slot.in_use is not None:
            slot.in_use.synchronize()
        target[rows].copy_(slot.pinned[: rows.stop - rows.start])
        queued.popleft()
        self._reads.give_back(slot)

    def _scatter(self, slot: _Slot, index: torch.Tensor, source: torch.Tensor) -> None:
        """Queues the copy of `source` to the pages of `index`."""
        num_pages = len(index)
        slot.pinned_index[:num_pages].copy_(index)
        slot.pinned[:num_pages].copy_(source)
        with self._writes.queueing(slot):
            slot.index[:num_pages].copy_(slot.pinned_index[:num_pages], non_blocking=True)
            slot.gathered[:num_pages].copy_(slot.pinned[:num_pages], non_blocking=True)
            self._pages.index_copy_(0, slot.index[:num_pages], slot.gathered[:num_pages])


def _check_rows(index: torch.Tensor, rows: torch.Tensor) -> None:
    if len(index) != len(rows):
        raise ValueError(f"{len(rows)} rows were given for {len(index)} pages")


class _Ring:
    """One direction: a stream, and the slots whose turn comes in the order in which they were given back."""

    def __init__(self, pages: torch.Tensor, streams: Streams, num_slots: int, slot_bytes: int) -> None:
        num_words = pages.shape[1]
        self._streams = streams
        self._slot_pages = max(1, slot_bytes // (num_words * pages.element_size()))
        self._stream = streams.side_stream()
        self._stream.keep(pages)
        self._returned = threading.Condition()

        def make_slot() -> _Slot:
            shape, count = (self._slot_pages, num_words), self._slot_pages
            return _Slot(
                streams.pinned_bytes(8 * count * num_words).view(torch.int64).view(shape),
                streams.pinned_bytes(8 * count).view(torch.int64),
                self._stream.device_bytes(8 * count * num_words).view(torch.int64).view(shape),
                self._stream.device_bytes(8 * count).view(torch.int64),
            )

        self._free = deque(make_slot() for _ in range(num_slots))

    def slices(self, num_pages: int) -> Iterator[slice]:
        """Pieces of `num_pages` pages that fit a slot."""
        for start in range(0, num_pages, self._slot_pages):
            yield slice(start, min(start + self._slot_pages, num_pages))

    def take(self) -> _Slot:
        """A slot that the device uses no more. Waits for one."""
        with self._returned:
            self._returned.wait_for(lambda: self._free)
            slot = self._free.popleft()
        return self._when_unused(slot)

    def take_free(self) -> _Slot | None:
        """The same; None when all are taken."""
        with self._returned:
            if not self._free:
                return None
            slot = self._free.popleft()
        return self._when_unused(slot)

    def give_back(self, slot: _Slot) -> None:
        """The device may use it up to `in_use`."""
        with self._returned:
            self._free.append(slot)
            self._returned.notify()

    def begin_after(self, event: DeviceEvent) -> None:
        """What is queued from now on begins after `event`."""
        with self._stream.use():
            event.wait()

    def record(self) -> DeviceEvent:
        """Behind all that is queued."""
        with self._stream.use():
            return self._streams.record()

    @contextmanager
    def queueing(self, slot: _Slot) -> Iterator[None]:
        """Operators within it are queued, and use the buffers of `slot`: also those before one that fails."""
        with self._stream.use():
            try:
                yield
            finally:
                slot.in_use = self._streams.record()

    def _when_unused(self, slot: _Slot) -> _Slot:
        try:
            if slot.in_use is not None:
                slot.in_use.synchronize()
        except BaseException:
            self.give_back(slot)
            raise
        slot.in_use = None
        return slot
