"""The reader's half of the store: turns a lookup into verified parts, inside the worker that wants them.

A reader gets the blocks it asked for or fewer of them, never other ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ray import ObjectRef
from ray.exceptions import ObjectLostError

from kv.actor_calls import Actor
from kv.directory_client import DirectoryClient
from kv.errors import PartError
from kv.extents import ExtentSlice, Lookup, StoredPart, TailReceipt
from kv.layout import KvLayout
from kv.part_range import covers_all_lanes
from kv.part_refs import part_buffer
from kv.parts import DecodedPart, PartExpectation, decode_part
from kv.ray_failures import GONE_FOR_GOOD, STORE_FAILURES, failure_label

T = TypeVar("T")


_Buffers: TypeAlias = dict[str, asyncio.Task[Any] | None]
"""By part id: the part's buffer, being waited for; None for a part that is not in its store."""


@dataclass(frozen=True, slots=True, eq=False)
class FetchedPart:
    """Some layers and KV heads of consecutive blocks of the request, as a view into the object store; it keeps that as
    long as this lives."""

    first_block: int
    """Counted from the start of the request."""
    num_blocks: int
    first: int
    """Where these blocks begin along the first axis of the part's payload."""
    part: DecodedPart
    num_layers: int
    """With this part the first so many layers of all blocks of the fetch have arrived, lost ones left out."""


async def fetch_parts(
    directory: DirectoryClient,
    stores: Mapping[str, Actor],
    lookup: Lookup,
    keys: Sequence[bytes],
    layout: KvLayout,
    fingerprint: bytes,
    *,
    timeout_s: float,
    on_miss: Callable[[str, int], None],
) -> AsyncGenerator[FetchedPart]:
    """Fetch what a lookup found: the first layers of all blocks, in block order, then the next layers. Who computes
    meanwhile can begin with the first layers.

    Blocks that cannot be had, and all after them, are left out from then on; when the iteration has ended, all parts of
    all blocks before them have been given. A broken extent is reported, so that the next lookup does not find it. The
    lease is released when the iteration ends: iterate to the end, or close the iterator (`contextlib.aclosing`).

    Args:
        stores: node stores by id.
        lookup: what the directory returned for `keys`.
        keys: the chain of the request; every block that is given carries its key.
        timeout_s: for the whole fetch. Should be below the time of the lease.
        on_miss: called when blocks are left out: with a metric label, and the number of blocks, from the start of the
            request, that may still come.

    Raises:
        ValueError: `keys` are fewer than the lookup found; without its key no block can be verified.
    """
    deadline_s = time.monotonic() + timeout_s
    answers: dict[str, asyncio.Task[_Buffers]] = {}
    try:
        if len(keys) < lookup.num_blocks:
            raise ValueError(f"{len(keys)} keys were given for {lookup.num_blocks} blocks: give those of the lookup")
        answers.update(_ask_stores(stores, lookup, deadline_s))
        wanted = _in_order(lookup)
        complete: set[str] = set()
        while wanted:
            at_block, piece, part = wanted.pop(0)
            if piece.store_id not in stores:
                wanted = [later for later in wanted if later[0] < at_block]
                on_miss("unknown_store", at_block)
                continue
            try:
                if piece.extent_id not in complete:
                    if not covers_all_lanes(layout, (part.range for part in piece.parts)):
                        raise PartError("lanes", f"extent {piece.extent_id} does not hold every layer and KV head once")
                    complete.add(piece.extent_id)
                answer = asyncio.shield(answers[part.part_id])  # other parts may wait for the same one
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    buffers = await answer
                buffer = buffers[part.part_id]
                if buffer is None:
                    raise PartError("gone", f"{part.part_id} is not in its store")
                own_keys = tuple(keys[at_block : at_block + piece.count])
                expect = PartExpectation(layout, fingerprint, part.range, own_keys, first_key=piece.first)
                decoded = decode_part(await buffer, expect)
                buffers[part.part_id] = None  # or the object would be kept until all have been given
            except STORE_FAILURES as error:
                _report(error, piece, directory, stores)
                wanted = [later for later in wanted if later[0] < at_block]
                on_miss(failure_label(error), at_block)
                continue
            num_layers = wanted[0][2].range.first_layer if wanted else layout.num_layers
            yield FetchedPart(at_block, piece.count, piece.first, decoded, num_layers)
    finally:
        for task in set(answers.values()):
            if not task.cancel() and not task.cancelled() and task.exception() is None:
                for waiting in task.result().values():
                    if waiting is not None:
                        waiting.cancel()
        if lookup.lease_id is not None:
            directory.release(lookup.lease_id)


def _in_order(lookup: Lookup) -> list[tuple[int, ExtentSlice, StoredPart]]:
    """(first block, slice, part) of everything, by first layer, then by block."""
    wanted, first_block = [], lookup.first_block
    for piece in lookup.slices:
        wanted += [(first_block, piece, part) for part in piece.parts]
        first_block += piece.count
    return sorted(wanted, key=lambda item: (item[2].range.first_layer, item[0], item[2].range.first_head))


async def fetch_tail(
    stores: Mapping[str, Actor],
    tail: TailReceipt,
    num_tokens: int,
    layout: KvLayout,
    fingerprint: bytes,
    *,
    timeout_s: float,
    on_miss: Callable[[str], None],
) -> tuple[DecodedPart, ...] | None:
    """Claim the tail of a request of `num_tokens` tokens. None, after `on_miss`, when it cannot be had.

    A tail can be claimed once. The parts hold one block, every layer and KV head once.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        first_block = layout.full_blocks(num_tokens)
        if any((part.first_block, part.num_blocks) != (first_block, 1) for part in tail.ranges):
            raise PartError("range", f"the tail is not block {first_block} of the request")
        if not covers_all_lanes(layout, tail.ranges):
            raise PartError("lanes", "the tail does not hold every layer and KV head once")
        buffers: list[object] = [tail.inline]
        if tail.tail_id is not None:
            if tail.store_id not in stores:
                on_miss("unknown_store")
                return None
            async with asyncio.timeout(timeout_s):
                refs = await stores[tail.store_id].claim_tail.remote(tail.tail_id)
            if refs is None:
                raise PartError("gone", f"tail {tail.tail_id} was claimed, discarded or has expired")
            buffers = [await part_buffer(ref, deadline_s) for ref in refs]
        tail_tokens = num_tokens % layout.block_tokens
        return tuple(
            decode_part(buffer, PartExpectation(layout, fingerprint, part, (), last_block_tokens=tail_tokens))
            for part, buffer in zip(tail.ranges, buffers, strict=True)
        )
    except STORE_FAILURES as error:
        on_miss(failure_label(error))
        return None


def _ask_stores(stores: Mapping[str, Actor], lookup: Lookup, deadline_s: float) -> dict[str, asyncio.Task[_Buffers]]:
    """By part id, the answer that it will be in.

    What is in DRAM is asked for at once, a call a store: from then on the objects stay, whatever becomes of the lease.
    What has to come from a disk is a call for each extent and group of layers, so that the first can be used while the
    next are read.
    """
    calls: dict[tuple[str, str, int], list[str]] = {}
    for piece in lookup.slices:
        for part in piece.parts if piece.store_id in stores else ():
            call = ("", 0) if piece.tier == "dram" else (piece.extent_id, part.range.first_layer)
            calls.setdefault((piece.store_id, *call), []).append(part.part_id)
    answers: dict[str, asyncio.Task[_Buffers]] = {}
    for (store_id, _, _), part_ids in calls.items():
        answers.update(dict.fromkeys(part_ids, _quietly(_buffers_of(stores[store_id], part_ids, deadline_s))))
    return answers


async def _buffers_of(store: Actor, part_ids: Sequence[str], deadline_s: float) -> _Buffers:
    """All parts are waited for from the start: one after the other, each would cost a round through the event loop."""
    refs: list[ObjectRef[Any] | None] = await store.get_parts.remote(part_ids)
    return {
        part_id: None if ref is None else _quietly(part_buffer(ref, deadline_s))
        for part_id, ref in zip(part_ids, refs, strict=True)
    }


def _quietly(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task whose error, when nobody waits for it any more, is nobody's."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _report(error: Exception, piece: ExtentSlice, directory: DirectoryClient, stores: Mapping[str, Actor]) -> None:
    # Being slow, or out of reach for a moment, is not being broken.
    if isinstance(error, GONE_FOR_GOOD):
        directory.drop_store(piece.store_id)
    elif isinstance(error, PartError | ObjectLostError) and piece.store_id in stores:
        directory.drop_extent(piece.extent_id)
        stores[piece.store_id].drop.remote([piece.extent_id])
