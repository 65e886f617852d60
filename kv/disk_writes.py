"""Writing extents to a node's disk: behind DRAM's back, in the order in which they came, and at once what has to leave
DRAM.

Where the file system has less room than the limit says, the tier makes do for a while with what it has. While the disk
is left alone (`DiskPause`) nothing is written: what was to be is not, unless it is used again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv.disk.tier import DiskTier
from kv.disk_listing import DiskListing
from kv.disk_pause import DiskPause
from kv.dram_tier import DramTier
from kv.errors import DiskWriteError
from kv.extents import ExtentInfo, file_name_of
from kv.part_refs import part_buffer
from kv.ray_failures import STORE_FAILURES, failure_label

_QUEUE_LIMIT = 4096
"""Extents that wait to be written; when there are more, the disk is too slow for all of them anyway."""
_BUFFER_TIMEOUT_S = 5.0

logger = logging.getLogger("ray.serve")


class DiskWrites:
    """Used from the store's event loop; files are written in threads.

    Args:
        dram: where extents come from.
        listing: told of what was written, and makes room.
        pause: begins with a write that fails.
        retry_s: after the file system was full, the limit is less for so long.
        counts, refusals: of the disk tier, which these are part of.
    """

    def __init__(
        self,
        tier: DiskTier,
        dram: DramTier,
        listing: DiskListing,
        pause: DiskPause,
        retry_s: float,
        counts: Counter[str],
        refusals: Counter[str],
    ) -> None:
        self._tier = tier
        self._dram = dram
        self._listing = listing
        self._pause = pause
        self._retry_s = retry_s
        self._limit_held_until_s = 0.0
        self._counts = counts
        self._refusals = refusals
        self._queue: dict[str, None] = {}
        self._writing: str | None = None
        self._demoting: set[str] = set()
        """What is being written because it leaves DRAM, where it still is."""
        self._write_lock = asyncio.Lock()
        """Held while `_writing` is."""
        self._queue_changed = asyncio.Event()
        self._is_settled = asyncio.Event()

    @property
    def num_queued(self) -> int:
        """Extents that wait to be written."""
        return len(self._queue)

    def enqueue(self, extent_id: str) -> None:
        """An extent in DRAM is to be written soon, unless it is on disk."""
        if self._listing.info(extent_id) is not None or extent_id == self._writing or extent_id in self._demoting:
            return
        if self._pause.is_on:
            self._refusals["disk_paused"] += 1
            return
        if len(self._queue) >= _QUEUE_LIMIT:
            self._refusals["disk_queue"] += 1
            return
        self._queue[extent_id] = None
        self._is_settled.clear()
        self._queue_changed.set()

    def forget(self, extent_id: str) -> None:
        """An extent need not be written."""
        self._queue.pop(extent_id, None)

    async def demote(self, info: ExtentInfo, refs: Sequence[Any]) -> None:
        """An extent leaves DRAM; the directory has it there no more. Written now if it still waits to be."""
        extent_id = info.extent_id
        if extent_id == self._writing:
            async with self._write_lock:  # then it is there, and listed
                pass
        elif self._listing.info(extent_id) is not None:
            await asyncio.to_thread(self._tier.touch, file_name_of(extent_id))
        elif not self._listing.scanned.is_set():
            self._refusals["disk_scanning"] += 1
        elif extent_id in self._queue:
            del self._queue[extent_id]
            self._demoting.add(extent_id)
            try:
                is_written = await self._write_and_list(info, refs)
            finally:
                self._demoting.discard(extent_id)
            if is_written:
                self._counts["demoted_extents"] += 1
                self._counts["demoted_bytes"] += info.num_bytes

    async def write_behind(self) -> None:
        """Writes what is enqueued, for ever."""
        await self._listing.scanned.wait()
        while True:
            if not self._queue:
                self._is_settled.set()
                self._queue_changed.clear()
                await self._queue_changed.wait()
            extent_id = next(iter(self._queue), None)
            if extent_id is None:
                continue
            del self._queue[extent_id]
            info, refs = self._dram.ledger.extent(extent_id), self._dram.ledger.refs(extent_id)
            if info is None:
                continue
            async with self._write_lock:
                self._writing = extent_id
                try:
                    await self._write_and_list(info, refs)
                finally:
                    self._writing = None
            del refs  # or this loop would keep the objects until there is something else to write

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits to be written. False when something still does after `timeout_s`."""
        try:
            await asyncio.wait_for(self._is_settled.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _write_and_list(self, info: ExtentInfo, refs: Sequence[Any]) -> bool:
        """Whether the extent can be read from here on return. It may have left DRAM meanwhile."""
        if self._pause.is_on:
            self._refusals["disk_paused"] += 1
            return False
        try:
            num_bytes = await self._write(info, refs)
            return num_bytes is not None and await self._listing.add(info, num_bytes)
        except Exception:  # whatever it is: others are written after this one, and DRAM waits for its room
            logger.exception("extent %s could not be written", info.extent_id)
            self._refusals["disk_defect"] += 1
            return False

    async def _write(self, info: ExtentInfo, refs: Sequence[Any]) -> int | None:
        """Bytes that the new file takes; None when it could not be written."""
        try:
            deadline_s = time.monotonic() + _BUFFER_TIMEOUT_S
            buffers = [_bytes_of(await part_buffer(ref, deadline_s)) for ref in refs]
            num_bytes = DiskTier.size_on_disk([buffer.nbytes for buffer in buffers])
            if not await self._write_file(info, buffers, num_bytes):
                self._refusals["disk_paused" if self._pause.is_on else "disk_capacity"] += 1
                return None
            del buffers
        except DiskWriteError as error:
            self._refusals[error.reason] += 1
            if error.reason == "disk_blocked":  # others have other folders
                logger.warning("%s", error)
            else:
                self._pause.begin(str(error))
            return None
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            return None
        self._counts["written_extents"] += 1
        self._counts["written_bytes"] += num_bytes
        return num_bytes

    async def _write_file(self, info: ExtentInfo, buffers: Sequence[Any], num_bytes: int) -> bool:
        """False when there is no room, nor can be. Raises what making room and writing do."""
        if time.monotonic() >= self._limit_held_until_s:
            self._tier.release_limit()
        if not await self._listing.reserve(num_bytes):
            return False
        name = file_name_of(info.extent_id)
        try:
            await asyncio.to_thread(self._tier.write, name, info.parent, buffers)
        except DiskWriteError as error:
            if error.reason != "disk_full":
                raise
            # Others take up room that the limit gives to this tier. What is new replaces what is oldest all the same.
            self._refusals[error.reason] += 1
            limit_bytes = self._tier.hold_limit()
            self._limit_held_until_s = time.monotonic() + self._retry_s
            logger.warning("%s; the disk tier's limit is %d bytes for %g s", error, limit_bytes, self._retry_s)
        else:
            return True
        if not await self._listing.reserve(num_bytes):
            return False
        await asyncio.to_thread(self._tier.write, name, info.parent, buffers)
        return True


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, np.uint8)
