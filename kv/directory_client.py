"""The directory as those see it who call it: its actor's methods, with what they take and give in plain types.

Methods that are not coroutines do not wait, and nobody hears whether they arrived: what they end also ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kv.actor_calls import Actor
from kv.extents import Copy, ExtentInfo, Lookup, PutTicket
from kv.tiers import Tier
from kv.wire import LookupRequest, pack_copies, pack_extents, pack_keys, pack_request, unpack_lookup

_RELEASE_WITHIN_S = 0.2
"""The end of a lease waits so long for a lookup to go with: a call by itself would cost as much as the lookup."""


class DirectoryClient:
    """One caller's. Used from one event loop. Methods are those of `Directory`, times are the directory's.

    Args:
        actor: handle of the `DirectoryActor`.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self._released: list[int] = []
        self._release_timer: asyncio.TimerHandle | None = None

    # For readers

    async def match_blocks(self, keys: Sequence[bytes]) -> int:
        return int(await self.actor.match_blocks.remote(pack_keys(keys)))

    async def lookup(self, keys: Sequence[bytes], lease_s: float, skip_blocks: int = 0) -> Lookup:
        request = LookupRequest(keys, lease_s, skip_blocks, self._take_released())
        return unpack_lookup(await self.actor.lookup.remote(pack_request(request)))

    async def renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        renewed: list[int] = await self.actor.renew.remote(lease_ids, lease_s)
        return renewed

    def release(self, lease_id: int) -> None:
        """Goes with the next lookup, or by itself a moment later."""
        self._released.append(lease_id)
        if self._release_timer is None:
            loop = asyncio.get_running_loop()
            self._release_timer = loop.call_later(_RELEASE_WITHIN_S, self.send_released)

    def send_released(self) -> None:
        """Tell the directory now of all leases that have ended."""
        released = self._take_released()
        if released:
            self.actor.release.remote(released)

    def drop_extent(self, extent_id: str) -> None:
        self.actor.drop_extent.remote(extent_id)

    def drop_store(self, store_id: str) -> None:
        self.actor.drop_store.remote(store_id)

    # For stores

    async def begin_put(self, keys: Sequence[bytes], ttl_s: float) -> PutTicket:
        ticket: PutTicket = await self.actor.begin_put.remote(pack_keys(keys), ttl_s)
        return ticket

    async def commit_put(self, put_id: int, extents: Sequence[ExtentInfo]) -> bool:
        return bool(await self.actor.commit_put.remote(put_id, pack_extents(extents)))

    def abort_put(self, put_id: int) -> None:
        self.actor.abort_put.remote(put_id)

    async def settle(self, keys: Sequence[bytes], timeout_s: float) -> bool:
        """See `DirectoryActor.settle`."""
        return bool(await self.actor.settle.remote(pack_keys(keys), timeout_s))

    async def enroll(self, store_id: str) -> int:
        """See `DirectoryActor.enroll`."""
        return int(await self.actor.enroll.remote(store_id))

    async def adopt(self, copies: Sequence[Copy]) -> list[str]:
        refused: list[str] = await self.actor.adopt.remote(pack_copies(copies))
        return refused

    async def add_copy(self, extent_id: str, tier: Tier, num_bytes: int) -> bool:
        return bool(await self.actor.add_copy.remote(extent_id, tier, num_bytes))

    async def evict(self, store_id: str, tier: Tier, need_bytes: int) -> list[str]:
        extent_ids: list[str] = await self.actor.evict.remote(store_id, tier, need_bytes)
        return extent_ids

    async def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> list[str]:
        extent_ids: list[str] = await self.actor.shrink.remote(store_id, tier, excess_bytes)
        return extent_ids

    async def keep_house(self, store_id: str) -> tuple[int, dict[Tier, list[str]]]:
        """See `DirectoryActor.keep_house`."""
        answer: tuple[int, dict[Tier, list[str]]] = await self.actor.keep_house.remote(store_id)
        return answer

    async def extent_ids_of(self, store_id: str, tier: Tier) -> list[str]:
        extent_ids: list[str] = await self.actor.extent_ids_of.remote(store_id, tier)
        return extent_ids

    def _take_released(self) -> list[int]:
        released, self._released = self._released, []
        if self._release_timer is not None:
            self._release_timer.cancel()
            self._release_timer = None
        return released
