"""The disk tier of a node's store: what is written behind DRAM's back, read when DRAM has it no more, and found again
after a restart.

Extents are written soon after they were stored (or first used again: `admission`), so that making room in DRAM seldom
waits for the disk and a restart finds nearly everything. A damaged file is removed; whatever the disk refuses is a
counter, and the request it happened to goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kv.directory_client import DirectoryClient, Upkeep
from kv.disk.settings import DiskSettings
from kv.disk.tier import DiskTier
from kv.disk_listing import DiskListing
from kv.disk_pause import DiskPause
from kv.disk_reads import DiskReads
from kv.disk_writes import DiskWrites
from kv.dram_tier import DramTier
from kv.extent_read import ExtentRead
from kv.extents import ExtentInfo
from kv.store_stats import DiskStats


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
        self._directory = directory
        self._tier = tier
        self._dram = dram
        self._admission = settings.admission
        pause = DiskPause(settings.retry_s)
        self._listing = DiskListing(store_id, directory, tier, pause, self._counts, self._refusals)
        self._writes = DiskWrites(tier, dram, self._listing, pause, settings.retry_s, self._counts, self._refusals)
        self._reads = DiskReads(directory, tier, dram, self._forget_broken, self._counts, self._refusals)
        self._tasks = [asyncio.create_task(self._listing.scan()), asyncio.create_task(self._writes.write_behind())]

    # What the store tells it

    def stored(self, info: ExtentInfo) -> None:
        """An extent is new in DRAM."""
        if self._admission.admits(num_uses=0):
            self._writes.enqueue(info.extent_id)

    def used(self, extent_id: str) -> None:
        """An extent in DRAM was read."""
        if not self.has(extent_id) and self._admission.admits(num_uses=1):
            self._writes.enqueue(extent_id)

    async def demote(self, info: ExtentInfo, refs: Sequence[Any]) -> None:
        """An extent leaves DRAM; the directory has it there no more. Written now if it still waits to be."""
        await self._writes.demote(info, refs)

    async def drop(self, extent_ids: Sequence[str]) -> None:
        """Frees extents that the directory no longer lists here. Those that are not here are no error."""
        for extent_id in extent_ids:
            self._writes.forget(extent_id)
        await self._listing.remove(extent_ids)

    # What the store asks it for

    def has(self, extent_id: str) -> bool:
        """Whether an extent can be read from here."""
        return self._listing.info(extent_id) is not None

    async def read_part(self, extent_id: str, index: int) -> Any | None:
        """The reference of a part, read from its extent's file and not yet verified; None when it cannot be had. The
        whole extent is read, once for all who ask meanwhile."""
        reading = self.start_reading(extent_id)
        return None if reading is None else await reading.part(index)

    def start_reading(self, extent_id: str) -> ExtentRead | None:
        """Begins to read an extent, or joins who has begun (`DiskReads.start`). None when it is not here."""
        info, reading = self._listing.info(extent_id), self._reads.under_way(extent_id)
        return self._reads.start(info) if info is not None and reading is None else reading

    async def relist(self, upkeep: Upkeep) -> None:
        """Tells what is here where the directory knows nothing of it."""
        await self._listing.relist(upkeep)

    def doubt(self) -> None:
        """An answer of the directory was lost, and what it did with it."""
        self._listing.doubt()

    async def compare(self, upkeep: Upkeep) -> None:
        """Makes what is here and what the directory lists the same again; see `DiskListing.compare`."""
        await self._listing.compare(upkeep)

    def stats(self) -> DiskStats:
        counts = self._counts
        return DiskStats(
            limit_bytes=self._tier.limit_bytes,
            used_bytes=self._tier.used_bytes,
            other_bytes=self._tier.other_bytes,
            num_extents=len(self._listing),
            num_queued_extents=self._writes.num_queued,
            is_scanned=self._listing.scanned.is_set(),
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
        await self._listing.trim()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing waits to be written. False when something still does after `timeout_s`."""
        return await self._writes.flush(timeout_s)

    async def is_lost(self) -> bool:
        """Whether the folder is no longer this store's; see `DiskTier.is_lost`."""
        return await asyncio.to_thread(self._tier.is_lost)

    async def give_up(self) -> None:
        """Closes a tier that is lost, and has the directory forget what it had."""
        await self.close()
        await self._listing.give_up()

    async def close(self) -> None:
        """Ends the work under way and gives the folder free."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._tier.close)

    async def _forget_broken(self, extent_id: str) -> None:
        # A copy may have got to DRAM before; the directory forgets the extent in all tiers.
        self._dram.drop([extent_id])
        await self._listing.remove([extent_id])
        self._directory.drop_extent(extent_id)
