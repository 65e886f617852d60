"""Which extents lie on a node's disk, and that the directory lists just these: what is written or found is told to it,
and what it makes room by is deleted."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv.directory_client import DirectoryClient, Upkeep
from kv.disk.tier import DiskTier, FoundExtent, Problem
from kv.disk_pause import DiskPause
from kv.extents import Copy, ExtentInfo, file_name_of
from kv.ray_failures import STORE_FAILURES, failure_label

_ADOPTED_AT_A_TIME = 256

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class _OnDisk:
    info: ExtentInfo
    num_bytes: int

    def copy(self) -> Copy:
        return Copy(self.info, "disk", self.num_bytes)


class DiskListing:
    """Used from the store's event loop; files are removed, and read at the start, in threads.

    Args:
        pause: begins with a removal that fails. What the directory had given up for room is listed again then.
        counts, refusals: of the disk tier, which these are part of.
    """

    def __init__(
        self,
        store_id: str,
        directory: DirectoryClient,
        tier: DiskTier,
        pause: DiskPause,
        counts: Counter[str],
        refusals: Counter[str],
    ) -> None:
        self.scanned = asyncio.Event()
        """Whether all that an earlier run left has been listed."""
        self._store_id = store_id
        self._directory = directory
        self._tier = tier
        self._pause = pause
        self._counts = counts
        self._refusals = refusals
        self._extents: dict[str, _OnDisk] = {}
        self._unwanted: set[str] = set()
        """Have files that could not be removed yet, which nobody is to read."""
        self._making_room = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._extents)

    def info(self, extent_id: str) -> ExtentInfo | None:
        """What is known of an extent that can be read from here, or None."""
        entry = self._extents.get(extent_id)
        return None if entry is None else entry.info

    async def add(self, info: ExtentInfo, num_bytes: int) -> bool:
        """An extent was written. Whether it can be read from here on return; else its file goes."""
        entry = self._extents[info.extent_id] = _OnDisk(info, num_bytes)
        return not await self._tell([entry])

    async def remove(self, extent_ids: Iterable[str]) -> None:
        """Deletes files that nobody is to read any more. Those that the file system does not let go of take their bytes
        of the limit until it does (`trim`)."""
        gone = [extent_id for extent_id in extent_ids if self._extents.pop(extent_id, None) is not None]
        self._unwanted.update(await self._delete(gone))

    async def relist(self, upkeep: Upkeep) -> None:
        """Tells what is here where the directory knows nothing of it."""
        copies = [entry.copy() for entry in self._extents.values()]
        await self.remove(await self._directory.relist(copies, upkeep))

    async def reserve(self, num_bytes: int) -> bool:
        """Takes bytes of the limit, for which others go if need be; False when they cannot be had, or the disk does not
        let go of them. Raises what the directory does."""
        await self.scanned.wait()
        async with self._making_room:
            shortage = self._tier.shortage(num_bytes)
            if shortage > 0:
                await self._let_go(await self._directory.evict(self._store_id, "disk", shortage))
        return self._tier.reserve(num_bytes)

    async def trim(self) -> None:
        """What is more than the limit goes, as far as nobody holds it; the rest at a later call. So does what could not
        be removed before."""
        if self._pause.is_on:
            return
        if self._unwanted:
            self._unwanted.intersection_update(await self._delete(list(self._unwanted)))
        async with self._making_room:
            shortage = self._tier.shortage(0)
            if shortage > 0 and not self._pause.is_on:
                await self._let_go(await self._directory.shrink(self._store_id, "disk", shortage))

    async def scan(self) -> None:
        """Lists what an earlier run left. Until it is done nothing is written: there may be no room yet."""
        found = iter(self._tier.scan())
        unusable: Counter[str] = Counter()
        try:
            while batch := await asyncio.to_thread(lambda: list(itertools.islice(found, _ADOPTED_AT_A_TIME))):
                entries = [self._entry(item) for item in batch if isinstance(item, FoundExtent)]
                self._counts["unusable_files"] += len(batch) - len(entries)
                unusable.update(item.reason for item in batch if isinstance(item, Problem))
                self._extents.update((entry.info.extent_id, entry) for entry in entries)
                refused = await self._directory.adopt([entry.copy() for entry in entries])
                await self.remove(refused)
                self._counts["found_extents"] += len(entries) - len(refused)
            await self.trim()
        except STORE_FAILURES as error:
            logger.warning("the disk tier's files could not all be listed: %s", error)
            self._refusals[failure_label(error)] += 1
        if unusable:
            logger.warning("files in the disk tier's folder that cannot be used, by reason: %s", dict(unusable))
        self.scanned.set()

    async def _let_go(self, extent_ids: Iterable[str]) -> None:
        """Deletes what the directory has given up for room, and lists again what is still there."""
        gone = {extent_id: entry for extent_id in extent_ids if (entry := self._extents.pop(extent_id, None))}
        stuck = [gone[extent_id] for extent_id in await self._delete(list(gone))]
        self._extents.update((entry.info.extent_id, entry) for entry in stuck)
        await self._tell(stuck)

    async def _delete(self, extent_ids: Sequence[str]) -> list[str]:
        """Those that the file system does not let go of; the disk is left alone then."""
        if not extent_ids:
            return []
        stuck = await asyncio.to_thread(
            lambda: [extent_id for extent_id in extent_ids if not self._tier.remove(file_name_of(extent_id))]
        )
        if stuck:
            self._refusals["disk_remove"] += len(stuck)
            self._pause.begin(f"files on the disk tier cannot be removed: {stuck[0]}, and {len(stuck) - 1} more")
        return stuck

    async def _tell(self, entries: Sequence[_OnDisk]) -> list[str]:
        """Has extents listed. Returns those that the directory refused, or was not told of; their files go."""
        if not entries:
            return []
        try:
            refused = await self._directory.adopt([entry.copy() for entry in entries])
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            refused = [entry.info.extent_id for entry in entries]
        await self.remove(refused)
        return refused

    def _entry(self, found: FoundExtent) -> _OnDisk:
        extent_id, index = f"{self._store_id}/{found.extent_id}", found.index
        first_block, lanes = index.ranges[0].first_block, tuple(part.lanes for part in index.ranges)
        info = ExtentInfo(extent_id, self._store_id, index.keys, first_block, lanes, index.num_bytes, index.parent)
        return _OnDisk(info, index.disk_bytes)
