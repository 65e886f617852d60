"""Directory and node store in one event loop, for situations that real ones cannot be brought into on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.addresses import StoreAddress
from actors.engine.loading import LoadedModel
from kv.extents import ExtentSlice, Lookup, PullReceipt
from kv.keys import block_keys
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from kv.tiers import Tier
from kv.wire import pack_lookup, unpack_request
from tests.engine_driver import make_prompt

BLOCK = 16
PROMPT = make_prompt(3 * BLOCK + 5)


class _Method:
    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class PlainStore:
    """Directory and node store in one: has the three first blocks of PROMPT, and a tail.

    The blocks lie in as many extents as `tiers` are given: 3 in one, or 1 in each of three. Extent i holds the number
    1.5 + i everywhere.
    """

    def __init__(self, loaded: LoadedModel, tiers: Sequence[Tier] = ("dram",)) -> None:
        self._fingerprint = loaded.fingerprint
        self.keys = self.keys_of(PROMPT)
        self.parts: dict[str, Any] = {}
        self.slices: list[ExtentSlice] = []
        count = 3 // len(tiers)
        for number, tier in enumerate(tiers):
            whole = PartRange(number * count, count, 0, 3, 0, 2)  # layers and heads of the small random models
            keys = self.keys[number * count : (number + 1) * count]
            draft = draft_part(PartHeader(loaded.layout, loaded.fingerprint, whole, keys, BLOCK))
            draft.payload[:] = 1.5 + number
            self.parts[f"e{number}/0"] = draft.seal()
            place = (whole.first_block, count, (whole.lanes,))
            self.slices.append(ExtentSlice(f"e{number}", "s", 0, count, *place, tier))
        self.prefetched: list[str] = []
        self.got: list[str] = []
        """Parts that were asked for."""
        self.answers = asyncio.Event()
        """Cleared: nothing is answered until it is set again."""
        self.answers.set()
        self.takes_over = asyncio.Event()
        """Cleared: pulls do not end until it is set again."""
        self.takes_over.set()
        self.pulled: list[tuple[str, tuple[bytes, ...], int]] = []
        """Export id, keys and number of tokens of every pull."""
        self.fails: Exception | None = None
        self.has_prefix = True
        self.lookups = 0
        self.leases: set[int] = set()
        self.tails = {"t"}
        for name in (
            "lookup",
            "release",
            "renew",
            "get_parts",
            "prefetch",
            "pull",
            "discard_tail",
            "claim_tail",
            "drop_store",
            "drop_extent",
            "drop",
        ):
            setattr(self, name, _Method(getattr(self, f"_{name}")))

    def keys_of(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(block_keys(tokens, BLOCK, self._fingerprint, b""))

    def address(self) -> StoreAddress:
        return StoreAddress((self,), {"s": self}, "s")

    async def _answer(self) -> None:
        await self.answers.wait()
        if self.fails is not None:
            raise self.fails

    async def _lookup(self, request: bytes) -> bytes:
        self.lookups += 1
        await self._release(unpack_request(request).released)
        await self._answer()
        if not self.has_prefix:
            return pack_lookup(Lookup(None, (), 0))
        self.leases.add(self.lookups)
        return pack_lookup(Lookup(self.lookups, tuple(self.slices), 3))

    async def _release(self, lease_ids: Sequence[int]) -> None:
        self.leases.difference_update(lease_ids)

    async def _renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        await self._answer()
        return [lease_id for lease_id in lease_ids if lease_id in self.leases]

    async def _get_parts(self, part_ids: Sequence[str]) -> list[asyncio.Future[Any]]:
        async def part(part_id: str) -> Any:
            await self._answer()
            return self.parts[part_id]

        self.got += part_ids
        return [asyncio.ensure_future(part(part_id)) for part_id in part_ids]

    async def _prefetch(self, part_ids: Sequence[str]) -> None:
        self.prefetched += part_ids

    async def _pull(self, _: Any, export_id: str, keys: Sequence[bytes], num_tokens: int, *__: Any) -> PullReceipt:
        self.pulled.append((export_id, tuple(keys), num_tokens))
        await self.takes_over.wait()
        await self._answer()
        return PullReceipt(3, None)

    async def _discard_tail(self, tail_id: str) -> None:
        self.tails.discard(tail_id)

    async def _claim_tail(self, tail_id: str) -> None:
        self.tails.discard(tail_id)

    async def _drop_extent(self, _: str) -> None:
        pass

    async def _drop_store(self, _: str) -> None:
        pass

    async def _drop(self, _: Sequence[str]) -> None:
        pass
