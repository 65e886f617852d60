"""The disk tier of a node's store: what is written behind DRAM's back, read when DRAM has it no more, and found again
after a restart.

Extents are written soon after they were stored (or first used again: `admission`), so that making room in DRAM seldom
waits for the disk and a restart finds nearly everything. A damaged file is removed; whatever the disk refuses is a
counter, and the request it happened to goes on. After a write that failed none is tried for a while: what is to be
written then is not, unless it is used again later.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv.directory_client import DirectoryClient, Upkeep
from kv.disk.settings import DiskSettings
from kv.disk.tier import DiskTier, FoundExtent, Problem
from kv.disk_reads import DiskReads
from kv.dram_tier import DramTier
from kv.errors import DiskWriteError
from kv.extent_read import ExtentRead
from kv.extents import Copy, ExtentInfo, file_name_of
from kv.part_refs import part_buffer
from kv.ray_failures import STORE_FAILURES, failure_label
from kv.store_stats import DiskStats

_ADOPTED_AT_A_TIME = 256
_QUEUE_LIMIT = 4096
"""Extents that wait to be written; when there are more, the disk is too slow for all of them anyway."""
_BUFFER_TIMEOUT_S = 5.0

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class _OnDisk:
    info: ExtentInfo
    num_bytes: int


class NodeDisk:
    """Used from the store's event loop; files are read and written in threads.

    Args:
        tier: open, and this object's from now on.
        dram: where extents come from, and go to when they are read.
        settings: those that `tier` was opened with.
    """

    def __init__(
        self,
        store_id: str,
        directory: DirectoryClient,
        tier: DiskTier,
        dram: DramTier,
        settings: DiskSettings,
    ) -> None:
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._store_id = store_id
        self._directory = directory
        self._tier = tier
        self._dram = dram
        self._admission = settings.admission
        self._retry_s = settings.retry_s
        self._extents: dict[str, _OnDisk] = {}
        self._queue: dict[str, None] = {}
        self._writing: str | None = None
        self._write_lock = asyncio.Lock()
        """Held while `_writing` is."""
        self._queue_changed = asyncio.Event()
        self._is_settled = asyncio.Event()
        self._scanned = asyncio.Event()
        self._making_room = asyncio.Lock()
        self._reads = DiskReads(directory, tier, dram, self._forget_broken, self._counts, self._refusals)
        self._paused_until_s = 0.0
        self._tasks = [asyncio.create_task(self._scan()), asyncio.create_task(self._write_behind())]

    # What the store tells it

    def stored(self, info: ExtentInfo) -> None:
        """An extent is new in DRAM."""
        if self._admission.admits(num_uses=0):
            self._enqueue(info.extent_id)

    def used(self, extent_id: str) -> None:
        """An extent in DRAM was read."""
        if extent_id not in self._extents and self._admission.admits(num_uses=1):
            self._enqueue(extent_id)

    async def demote(self, info: ExtentInfo, refs: Sequence[Any]) -> None:
        """An extent leaves DRAM; the directory has it there no more. Written now if it still waits to be."""
        extent_id = info.extent_id
        if extent_id == self._writing:
            async with self._write_lock:  # then it is there, and listed
                pass
        elif extent_id in self._extents:
            await asyncio.to_thread(self._tier.touch, file_name_of(extent_id))
        elif not self._scanned.is_set():
            self._refusals["disk_scanning"] += 1
        elif extent_id in self._queue:
            del self._queue[extent_id]
            if await self._write_and_list(info, refs):
                self._counts["demoted_extents"] += 1
                self._counts["demoted_bytes"] += info.num_bytes

    async def drop(self, extent_ids: Sequence[str]) -> None:
        """Frees extents that the directory no longer lists here. Those that are not here are no error."""
        for extent_id in extent_ids:
            self._queue.pop(extent_id, None)
        await self._remove(extent_ids)

    # What the store asks it for

    def has(self, extent_id: str) -> bool:
        """Whether an extent can be read from here."""
        return extent_id in self._extents

    async def read_part(self, extent_id: str, index: int) -> Any | None:
        """The reference of a part, read from its extent's file and not yet verified; None when it cannot be had. The
        whole extent is read, once for all who ask meanwhile."""
        reading = self.start_reading(extent_id)
        return None if reading is None else await reading.part(index)

    def start_reading(self, extent_id: str) -> ExtentRead | None:
        """Begins to read an extent, or joins who has begun (`DiskReads.start`). None when it is not here."""
        entry, reading = self._extents.get(extent_id), self._reads.under_way(extent_id)
        return self._reads.start(entry.info) if entry is not None and reading is None else reading

    async def relist(self, upkeep: Upkeep) -> None:
        """Tells what is here where the directory knows nothing of it."""
        copies = [Copy(entry.info, "disk", entry.num_bytes) for entry in self._extents.values()]
        await self._remove(await self._directory.relist(copies, upkeep))

    def stats(self) -> DiskStats:
        counts = self._counts
        return DiskStats(
            limit_bytes=self._tier.limit_bytes,
            used_bytes=self._tier.used_bytes,
            other_bytes=self._tier.other_bytes,
            num_extents=len(self._extents),
            num_queued_extents=len(self._queue),
            is_scanned=self._scanned.is_set(),
            num_found_extents=counts["found_extents"],
            num_unusable_files=counts["unusable_files"],
            num_written_extents=counts["written_extents"],
            written_bytes=counts["written_bytes"],
            num_demoted_extents=counts["demoted_extents"],
            demoted_bytes=counts["demoted_bytes"],
            num_read_extents=counts["read_extents"],
            read_bytes=counts["read_bytes"],
            num_promoted_extents=counts["promoted_extents"],
            promoted_bytes=counts["promoted_bytes"],
            refusals=dict(+self._refusals),
        )

    async def set_limit(self, limit_bytes: int) -> None:
        """Another limit from now on; see `trim`."""
        await asyncio.to_thread(self._tier.set_limit, limit_bytes)
        await self.trim()

    async def trim(self) -> None:
        """What is more than the limit goes, as far as nobody holds it; the rest at a later call."""
        async with self._making_room:
            shortage = self._tier.shortage(0)
            if shortage > 0:
                await self._remove(await self._directory.shrink(self._store_id, "disk", shortage))

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits to be written. False when something still does after `timeout_s`."""
        try:
            await asyncio.wait_for(self._is_settled.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends the work under way and gives the folder free."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._tier.close)

    # How

    def _enqueue(self, extent_id: str) -> None:
        if extent_id in self._extents or extent_id == self._writing:
            return
        if time.monotonic() < self._paused_until_s:
            self._refusals["disk_paused"] += 1
            return
        if len(self._queue) >= _QUEUE_LIMIT:
            self._refusals["disk_queue"] += 1
            return
        self._queue[extent_id] = None
        self._is_settled.clear()
        self._queue_changed.set()

    async def _write_behind(self) -> None:
        await self._scanned.wait()
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

    async def _write_and_list(self, info: ExtentInfo, refs: Sequence[Any]) -> bool:
        """Whether the extent can be read from here on return. It may have left DRAM meanwhile."""
        num_bytes = await self._write(info, refs)
        if num_bytes is None:
            return False
        try:
            refused = await self._directory.adopt([Copy(info, "disk", num_bytes)])
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            refused = [info.extent_id]
        await self._remove(refused)
        return not refused

    async def _write(self, info: ExtentInfo, refs: Sequence[Any]) -> int | None:
        """Bytes that the new file takes; None when it could not be written."""
        try:
            deadline_s = time.monotonic() + _BUFFER_TIMEOUT_S
            buffers = [_bytes_of(await part_buffer(ref, deadline_s)) for ref in refs]
            num_bytes = DiskTier.size_on_disk([buffer.nbytes for buffer in buffers])
            if not await self._reserve(num_bytes):
                self._refusals["disk_capacity"] += 1
                return None
            await asyncio.to_thread(self._tier.write, file_name_of(info.extent_id), info.parent, buffers)
            del buffers
        except DiskWriteError as error:
            logger.warning("%s; nothing is written for %g s", error, self._retry_s)
            self._refusals[error.reason] += 1
            self._refusals["disk_paused"] += len(self._queue)
            self._queue.clear()
            self._paused_until_s = time.monotonic() + self._retry_s
            return None
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            return None
        self._extents[info.extent_id] = _OnDisk(info, num_bytes)
        self._counts["written_extents"] += 1
        self._counts["written_bytes"] += num_bytes
        return num_bytes

    async def _forget_broken(self, extent_id: str) -> None:
        # A copy may have got to DRAM before; the directory forgets the extent in all tiers.
        self._dram.drop([extent_id])
        await self._remove([extent_id])
        self._directory.drop_extent(extent_id)

    async def _reserve(self, num_bytes: int) -> bool:
        await self._scanned.wait()
        await self._make_room(num_bytes)
        return self._tier.reserve(num_bytes)

    async def _make_room(self, num_bytes: int) -> None:
        async with self._making_room:
            shortage = self._tier.shortage(num_bytes)
            if shortage > 0:
                await self._remove(await self._directory.evict(self._store_id, "disk", shortage))

    async def _remove(self, extent_ids: Iterable[str]) -> None:
        """Deletes files. One that the file system does not let go of takes its bytes of the limit until a restart."""
        gone = [extent_id for extent_id in extent_ids if self._extents.pop(extent_id, None) is not None]
        if gone:
            removed = await asyncio.to_thread(
                lambda: [self._tier.remove(file_name_of(extent_id)) for extent_id in gone]
            )
            self._refusals["disk_remove"] += removed.count(False)

    async def _scan(self) -> None:
        """Lists what an earlier run left. Until it is done nothing is written: there may be no room yet."""
        found = iter(self._tier.scan())
        unusable: Counter[str] = Counter()
        try:
            while batch := await asyncio.to_thread(lambda: list(itertools.islice(found, _ADOPTED_AT_A_TIME))):
                entries = [self._entry(item) for item in batch if isinstance(item, FoundExtent)]
                self._counts["unusable_files"] += len(batch) - len(entries)
                unusable.update(item.reason for item in batch if isinstance(item, Problem))
                self._extents.update((entry.info.extent_id, entry) for entry in entries)
                copies = [Copy(entry.info, "disk", entry.num_bytes) for entry in entries]
                refused = await self._directory.adopt(copies)
                await self._remove(refused)
                self._counts["found_extents"] += len(entries) - len(refused)
            await self.trim()
        except STORE_FAILURES as error:
            logger.warning("the disk tier's files could not all be listed: %s", error)
            self._refusals[failure_label(error)] += 1
        if unusable:
            logger.warning("files in the disk tier's folder that cannot be used, by reason: %s", dict(unusable))
        self._scanned.set()

    def _entry(self, found: FoundExtent) -> _OnDisk:
        extent_id, index = f"{self._store_id}/{found.extent_id}", found.index
        first_block, lanes = index.ranges[0].first_block, tuple(part.lanes for part in index.ranges)
        info = ExtentInfo(extent_id, self._store_id, index.keys, first_block, lanes, index.num_bytes, index.parent)
        return _OnDisk(info, index.disk_bytes)


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, np.uint8)
