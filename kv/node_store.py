"""The DRAM tier of the global store: one actor per node that pulls parts from the workers of its node and owns them.

It is the caller of `worker.export`, hence the owner of what comes back: parts outlive the worker that computed them.
Whatever goes wrong with a worker, an object, the directory or the object store is a refusal with a counter; the request
it happened to goes on without the store.

A worker that can be pulled from is an actor with

    export(export_id: str, ranges: list[PartRange]) -> list of numpy uint8 arrays

which gives one encoded part per range, block offsets counted from the start of the request.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray
from ray import ObjectRef

from kv.extents import ExtentInfo, PullReceipt, StoredPart, TailReceipt
from kv.layout import KvLayout
from kv.part_range import MAX_PART_BYTES, SMALL_OBJECT_BYTES
from kv.part_refs import part_buffer
from kv.parts import decode_part
from kv.pull_plan import PlannedParts, plan_extents, plan_tail
from kv.ray_failures import STORE_FAILURES, failure_label
from kv.store_ledger import StoreLedger

Actor: TypeAlias = Any
"""An actor's handle. Ray's own type for it knows no remote methods."""

_DIRECTORY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Gauges, and counts since the start."""

    limit_bytes: int
    used_bytes: int
    """Held, and reserved by pulls that are under way."""
    num_extents: int
    num_tails: int
    num_pulls: int
    num_stored_blocks: int
    num_expired_tails: int
    refusals: dict[str, int]
    """By metric label."""


@dataclass(slots=True)
class _Pull:
    """What a pull has achieved, and what it has under way: that is given back when the pull ends."""

    deadline_s: float
    put_id: int | None = None
    reserved_bytes: int = 0
    unpublished: list[ExtentInfo] = field(default_factory=list)
    num_stored_blocks: int = 0
    tail: TailReceipt | None = None
    refusals: list[str] = field(default_factory=list)


@ray.remote(num_cpus=0, enable_task_events=False)  # as for workers: several tasks a request
class NodeStore:
    """See the module.

    Args:
        store_id: unique in the cluster; a restarted store keeps it and starts empty.
        directory: handle of the `DirectoryActor`.
        dram_limit_bytes: never holds more than this. Keep it below the node's object store, which also carries what is
            in flight.
        pull_timeout_s: how long a pull may wait for its worker.
        settle_timeout_s: how long a pull waits for blocks that another pull is bringing.
        tail_ttl_s: a tail that nobody claims is freed after this time.
        max_part_bytes, layer_groups: see `kv.part_range.plan_parts`.
    """

    def __init__(
        self,
        store_id: str,
        directory: Actor,
        dram_limit_bytes: int,
        *,
        pull_timeout_s: float = 10.0,
        settle_timeout_s: float = 2.0,
        tail_ttl_s: float = 60.0,
        max_part_bytes: int = MAX_PART_BYTES,
        layer_groups: int = 1,
    ) -> None:
        self._store_id = store_id
        self._directory = directory
        self._pull_timeout_s = pull_timeout_s
        self._settle_timeout_s = settle_timeout_s
        self._tail_ttl_s = tail_ttl_s
        self._cuts = {"max_part_bytes": max_part_bytes, "layer_groups": layer_groups}
        self._ledger = StoreLedger(dram_limit_bytes)
        self._making_room = asyncio.Lock()
        self._counts: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        # What an earlier process of this store owned is lost with it. No need to wait: a directory that this does not
        # reach, or reaches late, lists too little of us at worst.
        directory.drop_store.remote(store_id)

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
            worker: see the module.
            export_id: under which the worker knows the request's KV.
            keys: of the request's full blocks, from the first one.
            num_tokens: tokens whose KV the worker has; a last block that they do not fill is the tail.
        """
        pull = _Pull(time.monotonic() + self._pull_timeout_s)
        try:
            if len(keys) == layout.full_blocks(num_tokens):
                await self._pull(pull, worker, export_id, keys, num_tokens, layout, fingerprint)
            else:
                pull.refusals.append("keys")
        except STORE_FAILURES as error:
            pull.refusals.append(failure_label(error))
        finally:
            self._give_back(pull)
        self._counts.update(pulls=1, stored_blocks=pull.num_stored_blocks)
        self._refusals.update(pull.refusals)
        return PullReceipt(pull.num_stored_blocks, pull.tail, tuple(pull.refusals))

    async def get_parts(self, part_ids: Sequence[str]) -> list[ObjectRef[Any] | None]:
        """References to parts; None for one that is not here. Readers get them with a timeout and verify them."""
        return [self._ledger.part(part_id) for part_id in part_ids]

    async def claim_tail(self, tail_id: str) -> list[ObjectRef[Any]] | None:
        """The parts of a tail, which the store gives up: the reader's references keep them. None when it is gone."""
        refs = self._ledger.remove_tail(tail_id)
        return None if refs is None else list(refs)

    async def discard_tail(self, tail_id: str) -> None:
        """Free a tail that nobody will claim. One that is gone is no error."""
        self._ledger.remove_tail(tail_id)

    async def drop(self, extent_ids: Sequence[str]) -> None:
        """Free extents that the directory was told to forget. Those that are not here are no error."""
        for extent_id in extent_ids:
            self._ledger.remove_extent(extent_id)

    async def stats(self) -> StoreStats:
        return StoreStats(
            limit_bytes=self._ledger.limit_bytes,
            used_bytes=self._ledger.used_bytes,
            num_extents=self._ledger.num_extents,
            num_tails=self._ledger.num_tails,
            num_pulls=self._counts["pulls"],
            num_stored_blocks=self._counts["stored_blocks"],
            num_expired_tails=self._counts["expired_tails"],
            refusals=dict(self._refusals),
        )

    async def _pull(
        self,
        pull: _Pull,
        worker: Actor,
        export_id: str,
        keys: Sequence[bytes],
        num_tokens: int,
        layout: KvLayout,
        fingerprint: bytes,
    ) -> None:
        ticket = await self._ask(self._directory.begin_put.remote(keys, 2 * self._pull_timeout_s))
        pull.put_id = ticket.put_id
        # The tail gets room first: this request waits for it, while blocks are stored for later ones too.
        tail = plan_tail(layout, fingerprint, num_tokens, **self._cuts)
        if tail is not None and not _is_small(tail) and not await self._reserve(pull, tail.num_bytes):
            tail = None
        extents: list[PlannedParts] = []
        for extent in plan_extents(layout, fingerprint, keys, ticket.missing, **self._cuts):
            if not await self._reserve(pull, extent.num_bytes):
                break
            extents.append(extent)

        refs = _export(worker, export_id, extents if tail is None else [*extents, tail])
        for extent, extent_refs in zip(extents, refs, strict=False):
            if await self._verified(pull, extent, extent_refs) is None:
                break
            self._hold(pull, extent, extent_refs)
        await self._publish(pull)
        if tail is not None:
            await self._keep_tail(pull, tail, refs[-1])
        if ticket.num_pending_blocks > 0:
            await self._ask(self._directory.settle.remote(keys, self._settle_timeout_s))

    async def _reserve(self, pull: _Pull, num_bytes: int) -> bool:
        async with self._making_room:
            shortage = self._ledger.shortage(num_bytes)
            if shortage > 0:
                evicted = await self._ask(self._directory.evict.remote(self._store_id, shortage))
                await self.drop(evicted or await self._orphans())
            if not self._ledger.reserve(num_bytes):
                pull.refusals.append("capacity")
                return False
        pull.reserved_bytes += num_bytes
        return True

    async def _orphans(self) -> list[str]:
        """Extents that the directory lists no more: it was restarted, or a message was lost. Only we can free them."""
        published = self._ledger.published()
        listed = set(await self._ask(self._directory.extent_ids_of.remote(self._store_id)))
        return [extent_id for extent_id in published if extent_id not in listed]

    async def _verified(self, pull: _Pull, planned: PlannedParts, refs: Sequence[ObjectRef[Any]]) -> list[Any] | None:
        """Buffers of all the parts, or None when one of them did not come or is not what was asked for."""
        buffers = []
        try:
            for header, ref in zip(planned.headers, refs, strict=True):
                buffers.append(await part_buffer(ref, pull.deadline_s))
                decode_part(buffers[-1], header.expectation())
        except STORE_FAILURES as error:
            pull.refusals.append(failure_label(error))
            return None
        return buffers

    def _hold(self, pull: _Pull, extent: PlannedParts, refs: Sequence[ObjectRef[Any]]) -> None:
        extent_id = f"{self._store_id}/{uuid.uuid4().hex}"
        parts = tuple(StoredPart(f"{extent_id}/{index}", part.range) for index, part in enumerate(extent.headers))
        info = ExtentInfo(extent_id, self._store_id, extent.keys, parts, extent.num_bytes)
        self._ledger.add_extent(info, refs)
        pull.reserved_bytes -= extent.num_bytes
        pull.unpublished.append(info)

    async def _publish(self, pull: _Pull) -> None:
        if not pull.unpublished:
            return
        if not await self._ask(self._directory.commit_put.remote(pull.put_id, pull.unpublished)):
            pull.refusals.append("put_refused")
            return
        for info in pull.unpublished:
            self._ledger.publish(info.extent_id)
        pull.num_stored_blocks = sum(len(info.keys) for info in pull.unpublished)
        pull.unpublished.clear()
        pull.put_id = None

    async def _keep_tail(self, pull: _Pull, tail: PlannedParts, refs: Sequence[ObjectRef[Any]]) -> None:
        buffers = await self._verified(pull, tail, refs)
        if buffers is None:
            return
        ranges = tuple(header.range for header in tail.headers)
        num_tokens = tail.headers[0].last_block_tokens
        if _is_small(tail):
            inline = memoryview(buffers[0]).tobytes()
            pull.tail = TailReceipt(self._store_id, num_tokens, ranges, None, inline)
            return
        tail_id = uuid.uuid4().hex
        self._ledger.add_tail(tail_id, tuple(refs), tail.num_bytes)
        pull.reserved_bytes -= tail.num_bytes
        asyncio.get_running_loop().call_later(self._tail_ttl_s, self._expire_tail, tail_id)
        pull.tail = TailReceipt(self._store_id, num_tokens, ranges, tail_id, None)

    def _expire_tail(self, tail_id: str) -> None:
        if self._ledger.remove_tail(tail_id) is not None:
            self._counts["expired_tails"] += 1

    def _give_back(self, pull: _Pull) -> None:
        if pull.put_id is not None:
            self._directory.abort_put.remote(pull.put_id)
        for info in pull.unpublished:
            self._ledger.remove_extent(info.extent_id)
        self._ledger.give_back(pull.reserved_bytes)

    async def _ask(self, answer: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(answer, _DIRECTORY_TIMEOUT_S)


def _export(worker: Actor, export_id: str, wanted: Sequence[PlannedParts]) -> list[list[ObjectRef[Any]]]:
    """One call for all parts; the references come back grouped as they were asked for."""
    ranges = [header.range for planned in wanted for header in planned.headers]
    if not ranges:
        return []
    returned = worker.export.options(num_returns=len(ranges)).remote(export_id, ranges)
    refs = iter([returned] if isinstance(returned, ObjectRef) else returned)
    return [[next(refs) for _ in planned.headers] for planned in wanted]


def _is_small(tail: PlannedParts) -> bool:
    """Whether the worker's return would live in our heap anyway."""
    return tail.num_bytes <= SMALL_OBJECT_BYTES
