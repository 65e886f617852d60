"""Pulling: how a node's store takes over a request's KV from a worker of its node.

A worker that can be pulled from is an actor with

    export(export_id: str, ranges: list[PartRange]) -> list of numpy uint8 arrays

which gives one encoded part per range, block offsets counted from the start of the request.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from kv.actor_calls import Actor, ask
from kv.directory_client import DirectoryClient
from kv.dram_tier import DramTier
from kv.extents import ExtentInfo, PullReceipt, TailReceipt
from kv.layout import KvLayout
from kv.part_range import SMALL_OBJECT_BYTES
from kv.part_refs import part_buffer
from kv.parts import decode_part
from kv.pull_plan import PlannedParts, plan_extents, plan_tail
from kv.ray_failures import STORE_FAILURES, failure_label
from kv.shards import new_extent_id


@dataclass(frozen=True, slots=True)
class PullSettings:
    """How pulls are done."""

    timeout_s: float
    """How long a pull may wait for its worker."""
    settle_timeout_s: float
    """How long a pull waits for blocks that another pull is bringing."""
    tail_ttl_s: float
    """A tail that nobody claims is freed after this time."""
    max_part_bytes: int
    layer_groups: int
    """See `kv.part_range.plan_parts`; so `max_part_bytes`."""


@dataclass(slots=True)
class _Pull:
    """What a pull has achieved, and what it has under way: that is given back when the pull ends."""

    deadline_s: float
    put_id: int | None = None
    reserved_bytes: int = 0
    unpublished: list[ExtentInfo] = field(default_factory=list)
    num_stored_blocks: int = 0
    stored_bytes: int = 0
    tail: TailReceipt | None = None
    refusals: list[str] = field(default_factory=list)


class Puller:
    """One store's. Used from its event loop.

    Args:
        on_stored: told of every extent that has become visible.
    """

    def __init__(
        self,
        store_id: str,
        directory: DirectoryClient,
        dram: DramTier,
        settings: PullSettings,
        on_stored: Callable[[ExtentInfo], None],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """By metric label."""
        self._store_id = store_id
        self._directory = directory
        self._dram = dram
        self._settings = settings
        self._on_stored = on_stored
        self._cuts = {"max_part_bytes": settings.max_part_bytes, "layer_groups": settings.layer_groups}

    async def pull(
        self,
        worker: Actor,
        export_id: str,
        keys: Sequence[bytes],
        num_tokens: int,
        layout: KvLayout,
        fingerprint: bytes,
    ) -> PullReceipt:
        """See `NodeStore.pull`."""
        pull = _Pull(time.monotonic() + self._settings.timeout_s)
        try:
            if len(keys) == layout.full_blocks(num_tokens):
                await self._pull(pull, worker, export_id, keys, num_tokens, layout, fingerprint)
            else:
                pull.refusals.append("keys")
        except STORE_FAILURES as error:
            pull.refusals.append(failure_label(error))
        finally:
            self._give_back(pull)
        self.counts.update(pulls=1, stored_blocks=pull.num_stored_blocks, stored_bytes=pull.stored_bytes)
        self.refusals.update(pull.refusals)
        return PullReceipt(pull.num_stored_blocks, pull.tail, tuple(pull.refusals))

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
        ticket = await ask(self._directory.begin_put(keys, 2 * self._settings.timeout_s))
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
            self._hold(pull, extent, extent_refs, keys)
        await self._publish(pull)
        if tail is not None:
            await self._keep_tail(pull, tail, refs[-1])
        if ticket.num_pending_blocks > 0:
            await ask(self._directory.settle(keys, self._settings.settle_timeout_s))

    async def _reserve(self, pull: _Pull, num_bytes: int) -> bool:
        if not await self._dram.reserve(num_bytes):
            pull.refusals.append("capacity")
            return False
        pull.reserved_bytes += num_bytes
        return True

    async def _verified(self, pull: _Pull, planned: PlannedParts, refs: Sequence[ObjectRef[Any]]) -> list[Any] | None:
        """Buffers of all the parts, or None when one of them did not come or is not what was asked for."""
        try:
            buffers = list(await asyncio.gather(*(part_buffer(ref, pull.deadline_s) for ref in refs)))
            for header, buffer in zip(planned.headers, buffers, strict=True):
                decode_part(buffer, header.expectation())
        except STORE_FAILURES as error:
            pull.refusals.append(failure_label(error))
            return None
        return buffers

    def _hold(self, pull: _Pull, extent: PlannedParts, refs: Sequence[ObjectRef[Any]], keys: Sequence[bytes]) -> None:
        """`keys`: of the request."""
        start = extent.headers[0].range.first_block
        parent = keys[start - 1] if start else None
        extent_id = new_extent_id(self._store_id, keys[0])
        lanes = tuple(part.range.lanes for part in extent.headers)
        info = ExtentInfo(extent_id, self._store_id, extent.keys, start, lanes, extent.num_bytes, parent)
        self._dram.ledger.add_extent(info, refs)
        pull.reserved_bytes -= extent.num_bytes
        pull.unpublished.append(info)

    async def _publish(self, pull: _Pull) -> None:
        if pull.put_id is None or not pull.unpublished:
            return
        if not await ask(self._directory.commit_put(pull.put_id, pull.unpublished)):
            pull.refusals.append("put_refused")
            return
        for info in pull.unpublished:
            self._dram.ledger.publish(info.extent_id)
            self._on_stored(info)
        pull.num_stored_blocks = sum(len(info.keys) for info in pull.unpublished)
        pull.stored_bytes = sum(info.num_bytes for info in pull.unpublished)
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
        self._dram.ledger.add_tail(tail_id, tuple(refs), tail.num_bytes)
        pull.reserved_bytes -= tail.num_bytes
        asyncio.get_running_loop().call_later(self._settings.tail_ttl_s, self._expire_tail, tail_id)
        pull.tail = TailReceipt(self._store_id, num_tokens, ranges, tail_id, None)

    def _expire_tail(self, tail_id: str) -> None:
        if self._dram.ledger.remove_tail(tail_id) is not None:
            self.counts["expired_tails"] += 1

    def _give_back(self, pull: _Pull) -> None:
        if pull.put_id is not None:
            self._directory.abort_put(pull.put_id)
        for info in pull.unpublished:
            self._dram.ledger.remove_extent(info.extent_id)
        self._dram.ledger.give_back(pull.reserved_bytes)


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
