"""Directory and node store in one event loop, which keep what they pull from workers: the way of KV between workers
without Ray."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.addresses import StoreAddress
from kv.extents import ExtentSlice, Lookup, PullReceipt, TailReceipt
from kv.layout import KvLayout
from kv.part_range import LaneRange, PartRange
from kv.parts import PartHeader, decode_part
from kv.wire import pack_lookup, unpack_request

BLOCKS_EACH = 3
"""Of an extent, at most."""
LANES = (LaneRange(0, 1, 0, 2), LaneRange(1, 2, 0, 1), LaneRange(1, 2, 1, 1))
"""Parts of an extent, for models of three layers and two KV heads: what is moved begins and ends within a part."""


class Exporter(Protocol):
    """What a store pulls from."""

    async def export(self, export_id: str, ranges: Sequence[PartRange]) -> list[NDArray[np.uint8]]:
        """See `Worker.export`."""


class _Method:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class PartShelf:
    """`before` is awaited with the number of exports and fetches of parts so far, before each of them."""

    def __init__(self) -> None:
        self.refusals: list[Exception] = []
        """Of exports."""
        self.before: Callable[[int], Awaitable[None]] | None = None
        self._events = itertools.count()
        self._names = itertools.count()
        self._parts: dict[str, NDArray[np.uint8]] = {}
        self._payloads: dict[str, NDArray[Any]] = {}
        self._place: dict[bytes, tuple[ExtentSlice, int]] = {}
        for name in ("lookup", "release", "get_parts", "pull", "discard_tail"):
            setattr(self, name, _Method(getattr(self, f"_{name}")))

    def address(self) -> StoreAddress:
        return StoreAddress((self,), {"s": self}, "s")

    def kv_of(self, key: bytes) -> NDArray[Any]:
        """[layers, heads, 2, block_tokens, head_dim] of a block."""
        extent, index = self._place[key]
        pieces = [self._payloads[f"{extent.extent_id}/{part}"][index] for part in range(len(LANES))]
        return np.concatenate([pieces[0], np.concatenate(pieces[1:], axis=1)])

    async def _next_event(self) -> None:
        number = next(self._events)
        if self.before is not None:
            await self.before(number)

    async def _lookup(self, request: bytes) -> bytes:
        keys = unpack_request(request).keys
        found = list(itertools.takewhile(lambda place: place is not None, map(self._place.get, keys)))
        slices = []
        for extent, places in itertools.groupby(found, key=lambda place: place[0]):  # type: ignore[index]
            indices = [place[1] for place in places]  # type: ignore[index]
            slices.append(
                ExtentSlice(
                    extent.extent_id,
                    "s",
                    indices[0],
                    len(indices),
                    extent.first_block,
                    extent.num_blocks,
                    LANES,
                    "dram",
                )
            )
        return pack_lookup(Lookup(1 if slices else None, tuple(slices), len(found)))

    async def _release(self, _: Sequence[int]) -> None:
        pass

    async def _get_parts(self, part_ids: Sequence[str]) -> list[asyncio.Future[Any]]:
        async def part(part_id: str) -> Any:
            await self._next_event()
            return self._parts[part_id]

        return [asyncio.ensure_future(part(part_id)) for part_id in part_ids]

    async def _pull(
        self, worker: Exporter, export_id: str, keys: Sequence[bytes], num_tokens: int, layout: KvLayout, model: bytes
    ) -> PullReceipt:
        tail_tokens = num_tokens % layout.block_tokens
        missing = [block for block, key in enumerate(keys) if key not in self._place]
        headers = [
            PartHeader(layout, model, PartRange(first, count, *lanes), tuple(keys[first : first + count]), 16)
            for first, count in _runs(missing)
            for lanes in LANES
        ]
        if tail_tokens:
            headers.append(PartHeader(layout, model, PartRange(len(keys), 1, 0, 3, 0, 2), (), tail_tokens))
        await self._next_event()
        try:
            parts = await worker.export(export_id, [header.range for header in headers])
        except Exception as error:  # as the store does, whose worker is another process
            self.refusals.append(error)
            return PullReceipt(0, None, ("raised",))
        decoded = [decode_part(part, header.expectation()) for header, part in zip(headers, parts, strict=True)]
        tail = None
        if tail_tokens:
            ranges = (headers.pop().range,)
            tail = TailReceipt("s", tail_tokens, ranges, None, memoryview(parts.pop()).tobytes())
        for number in range(0, len(headers), len(LANES)):
            extent_id, where = f"s/{next(self._names)}", headers[number].range
            for index in range(len(LANES)):
                self._parts[f"{extent_id}/{index}"] = parts[number + index]
                self._payloads[f"{extent_id}/{index}"] = decoded[number + index].payload
            whole = ExtentSlice(extent_id, "s", 0, where.num_blocks, where.first_block, where.num_blocks, LANES, "dram")
            for index, key in enumerate(headers[number].keys):
                self._place[key] = (whole, index)
        return PullReceipt(len(missing), tail)

    async def _discard_tail(self, _: str) -> None:
        pass


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] + runs[-1][1] == block and runs[-1][1] < BLOCKS_EACH:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
