"""Which extents lie on a node's disk, and that the directory lists just these: what is written or found is told to it,
and what it makes room by is deleted.

Any answer of the directory may be lost, though it did what it was asked. So what it may not have heard of is told
again, and now and then both are compared: what it was told of and does not list, it has given up, and the file goes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kv.directory_client import DirectoryClient, Upkeep
from kv.disk.findings import FoundExtent, Problem
from kv.disk.tier import DiskTier
from kv.disk_pause import DiskPause
from kv.extents import Copy, ExtentInfo, file_name_of
from kv.ray_failures import STORE_FAILURES, failure_label

_ADOPTED_AT_A_TIME = 256
_TELL_AGAIN_AFTER_S = 1.0
_COMPARED_EVERY_S = 60.0
"""When nothing is known to have gone wrong: a reader's word to drop an extent may be lost."""

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
        self._untold: set[str] = set()
        """Of the extents, those that the directory may not have heard of."""
        self._suspects: set[str] = set()
        """Of the others, those that it did not list when they were compared."""
        self._is_in_doubt = False
        self._next_comparison_s = time.monotonic() + _COMPARED_EVERY_S
        self._making_room = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._extents)

    def info(self, extent_id: str) -> ExtentInfo | None:
        """What is known of an extent that can be read from here, or None."""
        entry = self._extents.get(extent_id)
        return None if entry is None else entry.info

    async def add(self, info: ExtentInfo, num_bytes: int) -> bool:
        """An extent was written. Whether it is listed on return; it may be later, unless the directory refuses it."""
        entry = self._extents[info.extent_id] = _OnDisk(info, num_bytes)
        await self._tell([entry])
        return info.extent_id in self._extents and info.extent_id not in self._untold

    async def remove(self, extent_ids: Iterable[str]) -> None:
        """Deletes files that nobody is to read any more. Those that the file system does not let go of take their bytes
        of the limit until it does (`trim`)."""
        self._unwanted.update(await self._delete([entry.info.extent_id for entry in self._take(extent_ids)]))

    async def relist(self, upkeep: Upkeep) -> None:
        """Tells what is here where the directory knows nothing of it."""
        copies = [entry.copy() for entry in self._extents.values()]
        await self.remove(await self._directory.relist(copies, upkeep))

    def doubt(self) -> None:
        """An answer of the directory was lost, and what it did with it."""
        self._is_in_doubt = True

    async def compare(self, upkeep: Upkeep) -> None:
        """Tells again what the directory may not have heard of, and removes what it has given up unheard. To be called
        whenever it answered to `keep_house`, and what it does not know was relisted. Raises what it fails with."""
        suspects, self._suspects = self._suspects, set()
        if not self.scanned.is_set():
            return
        if upkeep.failures or upkeep.new_ids:
            self.doubt()
            return
        # A part of the directory that was restarted lists nothing. Those that have answered now are the ones that were
        # asked then, and knew of this store.
        await self.remove(suspects)
        untold = [self._extents[extent_id] for extent_id in self._extents if extent_id in self._untold]
        for start in range(0, len(untold), _ADOPTED_AT_A_TIME):
            if not await self._tell(untold[start : start + _ADOPTED_AT_A_TIME]):
                return
        if self._is_in_doubt or time.monotonic() >= self._next_comparison_s:
            await asyncio.to_thread(self._tier.recount)
            await self._find_suspects()
            self._is_in_doubt = False
            self._next_comparison_s = time.monotonic() + _COMPARED_EVERY_S

    async def reserve(self, num_bytes: int) -> bool:
        """Takes bytes of the limit, for which others go if need be; False when they cannot be had, or the disk does not
        let go of them. Raises what the directory does."""
        await self.scanned.wait()
        async with self._making_room:
            shortage = self._tier.shortage(num_bytes)
            if shortage > 0:
                with self._doubting():
                    evicted = await self._directory.evict(self._store_id, "disk", shortage)
                await self._let_go(evicted)
        return self._tier.reserve(num_bytes)

    async def trim(self) -> None:
        """What is more than the limit goes, as far as nobody holds it; the rest at a later call. So does what could not
        be removed before."""
        if self._pause.is_on:
            return
        if self._unwanted:
            tried = list(self._unwanted)
            self._unwanted -= set(tried).difference(await self._delete(tried))
        async with self._making_room:
            shortage = self._tier.shortage(0)
            if shortage > 0 and not self._pause.is_on:
                with self._doubting():
                    evicted = await self._directory.shrink(self._store_id, "disk", shortage)
                await self._let_go(evicted)

    async def give_up(self) -> None:
        """The files are not this store's any more. The directory forgets them, but for those that somebody holds: who
        asks for these is told that they are gone, and reports it."""
        num_bytes = sum(entry.num_bytes for entry in self._extents.values())
        self._take(list(self._extents))
        try:
            await self._directory.shrink(self._store_id, "disk", num_bytes)
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1

    async def scan(self) -> None:
        """Lists what an earlier run left, as soon as the directory answers. Until it is done nothing is written: there
        may be no room yet."""
        found = iter(self._tier.scan())
        unusable: Counter[str] = Counter()
        while batch := await asyncio.to_thread(lambda: list(itertools.islice(found, _ADOPTED_AT_A_TIME))):
            entries = [self._entry(item) for item in batch if isinstance(item, FoundExtent)]
            self._counts["unusable_files"] += len(batch) - len(entries)
            unusable.update(item.reason for item in batch if isinstance(item, Problem))
            self._extents.update((entry.info.extent_id, entry) for entry in entries)
            while not await self._tell(entries):
                logger.warning("the directory does not answer a disk tier that lists its files; it is asked again")
                await asyncio.sleep(_TELL_AGAIN_AFTER_S)
            self._counts["found_extents"] += sum(entry.info.extent_id in self._extents for entry in entries)
        if unusable:
            logger.warning("files in the disk tier's folder that cannot be used, by reason: %s", dict(unusable))
        try:
            await self.trim()
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
        self.scanned.set()

    async def _find_suspects(self) -> None:
        # Told or removed meanwhile (`_tell`, `_take`), an extent is no suspect.
        self._suspects = self._extents.keys() - self._untold
        try:
            listed = set(await self._directory.extent_ids_of(self._store_id, "disk"))
        except STORE_FAILURES:
            self._suspects = set()
            raise
        if self._suspects.isdisjoint(listed):
            # It forgot the store, as when a reader takes it for one that is gone: that is no word on its extents.
            self._untold.update(self._suspects)
            self._suspects = set()
        self._suspects -= listed

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        try:
            yield
        except STORE_FAILURES:
            self.doubt()
            raise

    def _take(self, extent_ids: Iterable[str]) -> list[_OnDisk]:
        """The entries of extents that are to be here no more."""
        taken = [entry for extent_id in extent_ids if (entry := self._extents.pop(extent_id, None)) is not None]
        self._heard({entry.info.extent_id for entry in taken})
        return taken

    def _heard(self, extent_ids: set[str]) -> None:
        self._untold -= extent_ids
        self._suspects -= extent_ids

    async def _let_go(self, extent_ids: Iterable[str]) -> None:
        """Deletes what the directory has given up for room, and lists again what is still there."""
        gone = {entry.info.extent_id: entry for entry in self._take(extent_ids)}
        stuck = [gone[extent_id] for extent_id in await self._delete(list(gone))]
        self._extents.update((entry.info.extent_id, entry) for entry in stuck)
        await self._tell(stuck)

    async def _delete(self, extent_ids: Sequence[str]) -> list[str]:
        """Those that the file system does not let go of; the disk is left alone then."""
        if not extent_ids:
            return []

        def delete() -> tuple[list[str], list[str]]:
            stuck = [extent_id for extent_id in extent_ids if not self._tier.remove(file_name_of(extent_id))]
            return stuck, [extent_id for extent_id in stuck if self._tier.is_file(file_name_of(extent_id))]

        stuck, files = await asyncio.to_thread(delete)
        self._refusals["disk_remove"] += len(set(stuck) - self._unwanted)  # once, however often they are tried
        if files:
            self._pause.begin(f"files on the disk tier cannot be removed: {files[0]}, and {len(files) - 1} more")
        return stuck

    async def _tell(self, entries: Iterable[_OnDisk]) -> bool:
        """Has extents listed that are here; what the directory refuses goes. False when it may not have heard of
        them: then it is told again."""
        copies = {extent_id: entry.copy() for entry in entries if (extent_id := entry.info.extent_id) in self._extents}
        if not copies:
            return True
        self._untold.update(copies)
        try:
            refused = await self._directory.adopt(list(copies.values()))
        except STORE_FAILURES as error:
            self._refusals[failure_label(error)] += 1
            return False
        self._heard(set(copies))
        await self.remove(refused)
        return True

    def _entry(self, found: FoundExtent) -> _OnDisk:
        extent_id, index = f"{self._store_id}/{found.extent_id}", found.index
        first_block, lanes = index.ranges[0].first_block, tuple(part.lanes for part in index.ranges)
        info = ExtentInfo(extent_id, self._store_id, index.keys, first_block, lanes, index.num_bytes, index.parent)
        return _OnDisk(info, index.disk_bytes)
