"""The global store's part on one node: an actor that pulls KV from the node's workers, owns it in DRAM and on disk, and
gives it to whoever asks, here or on another node.

It is the caller of `worker.export`, hence the owner of what comes back: parts outlive the worker that computed them.
Whatever goes wrong with a worker, an object, a file, the directory or the object store is a refusal with a counter; the
request it happened to goes on without the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import ObjectRef

from kv.actor_calls import Actor
from kv.directory_client import DirectoryClient, Upkeep
from kv.disk.settings import DiskSettings, folder_at
from kv.disk.tier import DiskTier
from kv.dram_tier import DramTier
from kv.errors import DiskTierError, PartUnavailableError
from kv.extents import ExtentInfo, PullReceipt, extent_of
from kv.layout import KvLayout
from kv.metrics.ray_exporter import RayExporter
from kv.metrics.readings import store_readings
from kv.node_disk import NodeDisk
from kv.part_range import MAX_PART_BYTES
from kv.puller import Puller, PullSettings
from kv.ray_failures import STORE_FAILURES, failure_label
from kv.store_stats import StoreStats

_HOUSEKEEPING_PERIOD_S = 1.0
_SHOWN_ID_CHARS = 8

logger = logging.getLogger("ray.serve")


@ray.remote(num_cpus=0)
class NodeStore:
    """See the module.

    Args:
        store_id: unique in the cluster; a restarted store keeps it. DRAM starts empty, the disk with what is there.
        directory: handles of the `DirectoryActor`s, by their numbers.
        dram_limit_bytes: never holds more than this. Keep it below the node's object store, which also carries what is
            in flight.
        disk: None for none. One that cannot be used is reported and done without, until a later try succeeds.
        pull_timeout_s, settle_timeout_s, tail_ttl_s, max_part_bytes, layer_groups: see `PullSettings`.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        store_id: str,
        directory: Sequence[Actor],
        dram_limit_bytes: int,
        *,
        disk: DiskSettings | None = None,
        pull_timeout_s: float = 10.0,
        settle_timeout_s: float = 2.0,
        tail_ttl_s: float = 60.0,
        max_part_bytes: int = MAX_PART_BYTES,
        layer_groups: int = 1,
    ) -> None:
        self._store_id = store_id
        self._directory = DirectoryClient(directory)
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        # What an earlier process of this store had in DRAM is lost with it. Waited for, since calls of an actor may
        # overtake one another.
        for error in await self._directory.enroll(store_id):
            logger.warning("the directory does not answer a store that starts: %s", failure_label(error))
        self._dram = DramTier(store_id, self._directory, dram_limit_bytes, self._demote)
        pulls = PullSettings(pull_timeout_s, settle_timeout_s, tail_ttl_s, max_part_bytes, layer_groups)
        self._puller = Puller(store_id, self._directory, self._dram, pulls, self._stored)
        self._disk_settings = disk
        self._disk: NodeDisk | None = None
        self._next_open_s = 0.0
        await self._open_disk()
        self._housekeeper = asyncio.create_task(self._keep_house())

    def __repr__(self) -> str:
        """What Ray shows of it, in its dashboard and before its lines of the log: whose store, shortened as Ray itself
        does with ids of nodes."""
        return f"NodeStore({self._store_id[:_SHOWN_ID_CHARS]})"

    async def pull(
        self,
        worker: Actor,
        export_id: str,
        keys: Sequence[bytes],
        num_tokens: int,
        layout: KvLayout,
        fingerprint: bytes,
    ) -> PullReceipt:
        """Take over a request's KV: store the full blocks that nobody has, and keep the tail for whoever claims it.

        On return the export is over, and every block of the request that could be stored is visible.

        Args:
            worker: see `kv.puller`.
            export_id: under which the worker knows the request's KV.
            keys: of the request's full blocks, from the first one.
            num_tokens: tokens whose KV the worker has; a last block that they do not fill is the tail.
        """
        return await self._puller.pull(worker, export_id, keys, num_tokens, layout, fingerprint)

    async def get_parts(self, part_ids: Sequence[str]) -> list[ObjectRef[Any] | None]:
        """References to parts, brought from the disk if need be; None for one that is not here. Readers get them with a
        timeout and verify them. Raises PartUnavailableError when one is on disk and cannot be read now."""
        refs: dict[str, ObjectRef[Any] | None] = {part_id: self._dram.ledger.part(part_id) for part_id in part_ids}
        in_dram = Counter(extent_of(part_id)[0] for part_id, ref in refs.items() if ref is not None)
        given_bytes = sum(self._dram.bytes_of_parts(extent_id, count) for extent_id, count in in_dram.items())
        if self._disk is not None:
            for extent_id in in_dram:
                self._disk.used(extent_id)
            wanted = [part_id for part_id, ref in refs.items() if ref is None]
            read = await asyncio.gather(*(self._disk.read_part(*extent_of(part_id)) for part_id in wanted))
            refs.update(zip(wanted, read, strict=True))
            for part_id in wanted:
                if refs[part_id] is None and self._disk.has(extent_of(part_id)[0]):
                    raise PartUnavailableError(f"part {part_id} is on disk, but cannot be read now")
        self._counts["given_bytes"] += given_bytes
        self._counts["given_parts"] += sum(refs[part_id] is not None for part_id in part_ids)
        return [refs[part_id] for part_id in part_ids]

    async def prefetch(self, part_ids: Sequence[str]) -> None:
        """Bring parts that are on disk only to DRAM, for a reader that will ask soon. Returns at once."""
        if self._disk is not None:
            for extent_id in {extent_of(part_id)[0]: None for part_id in part_ids}:
                if self._dram.ledger.extent(extent_id) is None and self._disk.has(extent_id):
                    self._counts["prefetched_extents"] += 1
                    self._disk.start_reading(extent_id)

    async def claim_tail(self, tail_id: str) -> list[ObjectRef[Any]] | None:
        """The parts of a tail, which the store gives up: the reader's references keep them. None when it is gone."""
        refs = self._dram.ledger.remove_tail(tail_id)
        return None if refs is None else list(refs)

    async def discard_tail(self, tail_id: str) -> None:
        """Free a tail that nobody will claim. One that is gone is no error."""
        self._dram.ledger.remove_tail(tail_id)

    async def drop(self, extent_ids: Sequence[str]) -> None:
        """Free extents that the directory was told to forget, in all tiers. Those that are not here are no error."""
        self._dram.drop(extent_ids)
        if self._disk is not None:
            await self._disk.drop(extent_ids)

    async def set_limits(self, dram_bytes: int, disk_bytes: int | None) -> None:
        """Other limits from now on. What is too much goes at once, what somebody holds soon after nobody does.
        `disk_bytes` None leaves the disk's as it is."""
        await self._dram.set_limit(dram_bytes)
        if self._disk_settings is not None and disk_bytes is not None:
            self._disk_settings = replace(self._disk_settings, limit_bytes=disk_bytes)
            if self._disk is not None:
                await self._disk.set_limit(disk_bytes)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the disk has what it is to have. False when it has not after `timeout_s`."""
        return self._disk is None or await self._disk.flush(timeout_s)

    async def close(self, flush_timeout_s: float) -> None:
        """End the store: write what waits to be written, and give the disk's folder free. The actor may be killed
        then."""
        self._housekeeper.cancel()
        if self._disk is not None:
            await self._disk.flush(flush_timeout_s)
            await self._disk.close()

    async def stats(self) -> StoreStats:
        return self._stats()

    def _stats(self) -> StoreStats:
        ledger, pulls = self._dram.ledger, self._puller.counts
        return StoreStats(
            limit_bytes=ledger.limit_bytes,
            used_bytes=ledger.used_bytes,
            num_extents=ledger.num_extents,
            num_tails=ledger.num_tails,
            num_pulls=pulls["pulls"],
            num_stored_blocks=pulls["stored_blocks"],
            stored_bytes=pulls["stored_bytes"],
            num_expired_tails=pulls["expired_tails"],
            num_given_parts=self._counts["given_parts"],
            given_bytes=self._counts["given_bytes"],
            num_prefetched_extents=self._counts["prefetched_extents"],
            refusals=dict(self._puller.refusals + self._refusals),
            disk=None if self._disk is None else self._disk.stats(),
        )

    async def _open_disk(self) -> None:
        """Tries to, where there is to be a disk tier and is none, and not too soon after the last time."""
        settings = self._disk_settings
        if settings is None or self._disk is not None or time.monotonic() < self._next_open_s:
            return
        try:
            tier = await asyncio.to_thread(
                DiskTier.open,
                folder_at(settings.folder),
                settings.limit_bytes,
                remove_leftovers=settings.remove_leftovers,
            )
        except DiskTierError as error:
            logger.error("there is no disk tier on this node for at least %g s: %s", settings.retry_s, error)
            self._refusals["disk_unavailable"] += 1
            self._next_open_s = time.monotonic() + settings.retry_s
            return
        self._disk = NodeDisk(self._store_id, self._directory, tier, self._dram, settings)
        for copy in self._dram.copies():
            self._disk.stored(copy.info)

    async def _give_up_lost_disk(self) -> None:
        """A folder whose lock is gone may be another store's. It is taken over anew, if it can be, after a while."""
        disk, settings = self._disk, self._disk_settings
        if disk is None or settings is None or not await disk.is_lost():
            return
        logger.error(
            "the disk tier's folder %s, or the lock file in it, was removed or replaced: there is no disk tier on this "
            "node for at least %g s",
            settings.folder,
            settings.retry_s,
        )
        self._refusals["disk_unavailable"] += 1
        self._disk = None
        self._next_open_s = time.monotonic() + settings.retry_s
        await disk.give_up()

    async def _demote(self, info: ExtentInfo, refs: Sequence[Any]) -> None:
        if self._disk is not None:
            await self._disk.demote(info, refs)

    def _stored(self, info: ExtentInfo) -> None:
        if self._disk is not None:
            self._disk.stored(info)

    async def _keep_house(self) -> None:
        """Frees what has outlived its time-to-live, and what is over a limit and held no more. Lists again what a
        part of the directory knew that was restarted. Exports metrics."""
        metrics = RayExporter()
        while True:
            metrics.export(store_readings(self._store_id, self._stats()))
            await asyncio.sleep(_HOUSEKEEPING_PERIOD_S)
            await self._give_up_lost_disk()
            await self._open_disk()
            try:
                upkeep = await self._directory.keep_house(self._store_id)
                self._refusals.update(f"housekeeping_{failure_label(error)}" for error in upkeep.failures)
                self._dram.drop(upkeep.gone["dram"])
                if self._disk is not None:
                    await self._disk.drop(upkeep.gone["disk"])
                if upkeep.new_ids:
                    await self._relist(upkeep)
                await self._dram.trim()
                if self._disk is not None:
                    await self._disk.trim()
                    await self._disk.compare(upkeep)
            except STORE_FAILURES as error:
                if self._disk is not None:
                    self._disk.doubt()
                self._refusals[f"housekeeping_{failure_label(error)}"] += 1

    async def _relist(self, upkeep: Upkeep) -> None:
        self._dram.drop(await self._directory.relist(self._dram.copies(), upkeep))
        if self._disk is not None:
            await self._disk.relist(upkeep)
        self._directory.has_relisted(upkeep)
        logger.warning("the directory began anew; what the store of node %s has of it is listed again", self._store_id)
