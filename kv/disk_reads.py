"""Reading extents from disk: their parts go to the object store one after the other, and to DRAM if there is room."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray

from kv.actor_calls import ask
from kv.directory_client import DirectoryClient
from kv.disk.read_buffer import ReadBuffer
from kv.disk.tier import DiskTier
from kv.dram_tier import DramTier
from kv.errors import PartError
from kv.extent_read import ExtentRead
from kv.extents import ExtentInfo, file_name_of
from kv.ray_failures import STORE_FAILURES, failure_label

_READS_AT_A_TIME = 4
"""More than there are cores: most of a read is waiting for the object store (load_tests/LOG.md)."""

logger = logging.getLogger("ray.serve")


class DiskReads:
    """Used from the store's event loop; files are read in threads of its own, each of which keeps a buffer of the
    largest part it has read.

    Args:
        forget: called with an extent whose file is broken.
        counts, refusals: of the disk tier, which these are part of.
    """

    def __init__(
        self,
        directory: DirectoryClient,
        tier: DiskTier,
        dram: DramTier,
        forget: Callable[[str], Awaitable[None]],
        counts: Counter[str],
        refusals: Counter[str],
    ) -> None:
        self._directory = directory
        self._tier = tier
        self._dram = dram
        self._forget = forget
        self._counts = counts
        self._refusals = refusals
        self._threads = ThreadPoolExecutor(_READS_AT_A_TIME, "read-extents")
        self._buffer = ReadBuffer()
        self._at_a_time = asyncio.Semaphore(_READS_AT_A_TIME)
        self._reads: dict[str, ExtentRead] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def under_way(self, extent_id: str) -> ExtentRead | None:
        """The read of an extent that has begun and not ended."""
        return self._reads.get(extent_id)

    def start(self, info: ExtentInfo) -> ExtentRead:
        """Begins to read an extent that is not being read. It is in DRAM then, if room for it could be made; else only
        the readers keep it."""
        reading = self._reads[info.extent_id] = ExtentRead(len(info.parts))
        task = asyncio.create_task(self._read(info, reading))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return reading

    async def _read(self, info: ExtentInfo, reading: ExtentRead) -> None:
        try:
            async with self._at_a_time:
                has_room = await self._put_parts(info, reading)
            await asyncio.to_thread(self._tier.touch, file_name_of(info.extent_id))
        except PartError as error:
            logger.warning("the file of extent %s cannot be used: %s", info.extent_id, error)
            self._refusals[failure_label(error)] += 1
            if error.reason != "unreadable":  # which may pass: too many open files, say
                await self._forget(info.extent_id)
            return
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            return
        finally:
            del self._reads[info.extent_id]
            reading.end()
        self._counts["read_extents"] += 1
        self._counts["read_bytes"] += info.num_bytes
        if has_room:
            self._counts["promoted_extents"] += 1
            self._counts["promoted_bytes"] += info.num_bytes

    async def _put_parts(self, info: ExtentInfo, reading: ExtentRead) -> bool:
        """Whether the extent is in DRAM now. Room is made while the first parts are being read: readers wait for
        neither the directory nor the last part."""
        room = asyncio.create_task(self._dram.reserve(info.num_bytes))
        loop = asyncio.get_running_loop()
        refs: list[Any] = []

        def has_read(ref: Any) -> None:
            refs.append(ref)
            reading.has_read(ref)

        def read_parts() -> None:
            with self._tier.open_extent(file_name_of(info.extent_id)) as file:
                if len(file.part_bytes) != len(info.lanes):
                    raise PartError("lanes", f"{len(file.part_bytes)} parts, {len(info.lanes)} are known of")
                for part in range(len(file.part_bytes)):
                    # Put, it is a copy: the buffer is free for the next one.
                    loop.call_soon_threadsafe(has_read, ray.put(file.read(part, self._buffer)))

        try:
            await loop.run_in_executor(self._threads, read_parts)
        except BaseException:
            with contextlib.suppress(*STORE_FAILURES):
                self._dram.ledger.give_back(info.num_bytes if await room else 0)
            raise
        if await room:
            await self._promote(info, refs)
        return room.result()

    async def _promote(self, info: ExtentInfo, refs: list[Any]) -> None:
        """Puts an extent into DRAM, where room is reserved for it; not for longer than the directory lists it there."""
        self._dram.ledger.add_extent(info, refs)
        is_listed = False
        try:
            is_listed = await ask(self._directory.add_copy(info.extent_id, "dram", info.num_bytes))
        finally:
            if is_listed:
                self._dram.ledger.publish(info.extent_id)
            else:
                self._dram.ledger.remove_extent(info.extent_id)
