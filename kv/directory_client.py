"""The directory as those see it who call it: its actors' methods, with what they take and give in plain types. Nobody
else knows that there may be several of them, its shards (`kv.shards`).

Methods that are not coroutines do not wait, and nobody hears whether they arrived: what they end also ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kv.actor_calls import Actor, ask
from kv.directory_room import DirectoryRoom
from kv.extents import Copy, ExtentInfo, HouseRound, Lookup, PutTicket
from kv.ray_failures import STORE_FAILURES
from kv.shards import hold_id_of, own_hold_id, shard_of_chain, shard_of_extent
from kv.tiers import TIERS, Tier
from kv.wire import LookupRequest, pack_copies, pack_extents, pack_keys, pack_request, unpack_lookup

_RELEASE_WITHIN_S = 0.2
"""The end of a lease waits so long for a lookup to go with: a call by itself would cost as much as the lookup."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a store is told now and then."""

    gone: dict[Tier, list[str]]
    """What has outlived its time-to-live, by tier, for the store to free there."""
    new_ids: dict[int, int]
    """Shards that know nothing of the store yet, with their ids. For `relist`."""
    failures: list[Exception]
    """Of shards that did not answer."""


class DirectoryClient:
    """One caller's. Used from one event loop. Methods are those of `Directory`, times are the directory's; a chain is
    always given from its first block.

    A shard that does not answer fails the calls that are for it alone: those for its chains. What is asked of several
    has a time limit for each (`kv.actor_calls.ask`), and is had from the others.

    Args:
        shards: handles of the `DirectoryActor`s, by their numbers.
        clock: seconds since whenever.
    """

    def __init__(self, shards: Sequence[Actor], clock: Callable[[], float] = time.monotonic) -> None:
        self.shards = tuple(shards)
        self._known_ids: list[int | None] = [None] * len(self.shards)
        """Of the shards as this store has told them of all it has."""
        self._room = DirectoryRoom(self.shards, clock)
        self._released: list[list[int]] = [[] for _ in self.shards]
        self._release_timer: asyncio.TimerHandle | None = None

    # For readers

    async def match_blocks(self, keys: Sequence[bytes]) -> int:
        return int(await self._of_chain(keys).match_blocks.remote(pack_keys(keys)))

    async def lookup(self, keys: Sequence[bytes], lease_s: float, skip_blocks: int = 0) -> Lookup:
        shard = shard_of_chain(keys, len(self.shards))
        request = LookupRequest(keys, lease_s, skip_blocks, self._take_released(shard))
        found = unpack_lookup(await self.shards[shard].lookup.remote(pack_request(request)))
        return found if found.lease_id is None else replace(found, lease_id=self._hold_id(found.lease_id, shard))

    async def renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        """Leases of a shard that fails while others answer count as renewed: they may have been. Raises what a shard
        fails with when all do."""
        own_ids: dict[int, list[int]] = {}
        for lease_id in lease_ids:
            shard, own_id = own_hold_id(lease_id, len(self.shards))
            own_ids.setdefault(shard, []).append(own_id)
        answers = await self._gather(
            {shard: self.shards[shard].renew.remote(ids, lease_s) for shard, ids in own_ids.items()}
        )
        failures = _failures(answers.values())
        if len(failures) == len(answers):
            _raise_first(failures)
        renewed = {
            self._hold_id(own_id, shard)
            for shard, answer in answers.items()
            for own_id in (own_ids[shard] if isinstance(answer, Exception) else answer)
        }
        return [lease_id for lease_id in lease_ids if lease_id in renewed]

    def release(self, lease_id: int) -> None:
        """Goes with the next lookup in its shard, or by itself a moment later."""
        shard, own_id = own_hold_id(lease_id, len(self.shards))
        self._released[shard].append(own_id)
        if self._release_timer is None:
            loop = asyncio.get_running_loop()
            self._release_timer = loop.call_later(_RELEASE_WITHIN_S, self.send_released)

    def send_released(self) -> None:
        """Tell the directory now of all leases that have ended."""
        for shard, actor in enumerate(self.shards):
            released = self._take_released(shard)
            if released:
                actor.release.remote(released)

    def drop_extent(self, extent_id: str) -> None:
        self._of_extent(extent_id).drop_extent.remote(extent_id)

    def drop_store(self, store_id: str) -> None:
        for actor in self.shards:
            actor.drop_store.remote(store_id)

    # For stores

    async def begin_put(self, keys: Sequence[bytes], ttl_s: float) -> PutTicket:
        shard = shard_of_chain(keys, len(self.shards))
        ticket: PutTicket = await self.shards[shard].begin_put.remote(pack_keys(keys), ttl_s)
        return ticket if ticket.put_id is None else replace(ticket, put_id=self._hold_id(ticket.put_id, shard))

    async def commit_put(self, put_id: int, extents: Sequence[ExtentInfo]) -> bool:
        """The names of the extents must be those of the chain (`kv.shards.new_extent_id`)."""
        shard, own_id = own_hold_id(put_id, len(self.shards))
        return bool(await self.shards[shard].commit_put.remote(own_id, pack_extents(extents)))

    def abort_put(self, put_id: int) -> None:
        shard, own_id = own_hold_id(put_id, len(self.shards))
        self.shards[shard].abort_put.remote(own_id)

    async def settle(self, keys: Sequence[bytes], timeout_s: float) -> bool:
        """See `DirectoryService.settle`."""
        return bool(await self._of_chain(keys).settle.remote(pack_keys(keys), timeout_s))

    async def enroll(self, store_id: str) -> list[Exception]:
        """See `DirectoryService.enroll`. Shards that do not answer are told everything when they do (`keep_house`).

        Returns:
            Their failures.
        """
        answers = await self._gather({shard: actor.enroll.remote(store_id) for shard, actor in enumerate(self.shards)})
        self._known_ids = [None if isinstance(answer, Exception) else int(answer) for answer in answers.values()]
        return _failures(answers.values())

    async def adopt(self, copies: Sequence[Copy]) -> list[str]:
        """Raises what a shard fails with when all that were asked do. What is for one that fails while others answer
        is not refused: the shard is told of all it should know when it answers again (`relist`)."""
        refused, failures, num_asked = await self._adopt(copies, range(len(self.shards)))
        if len(failures) == num_asked:
            _raise_first(failures.values())
        for shard in failures:
            self._known_ids[shard] = None
        return refused

    async def relist(self, copies: Sequence[Copy], upkeep: Upkeep) -> list[str]:
        """`adopt` of what belongs to the shards that know nothing of the store yet. Raises what any of them fails
        with."""
        refused, failures, _ = await self._adopt(copies, upkeep.new_ids)
        _raise_first(failures.values())
        return refused

    def has_relisted(self, upkeep: Upkeep) -> None:
        """The store has told the new shards of all it has."""
        for shard, directory_id in upkeep.new_ids.items():
            self._known_ids[shard] = directory_id

    async def add_copy(self, extent_id: str, tier: Tier, num_bytes: int) -> bool:
        return bool(await self._of_extent(extent_id).add_copy.remote(extent_id, tier, num_bytes))

    async def evict(self, store_id: str, tier: Tier, need_bytes: int) -> list[str]:
        """See `DirectoryRoom.evict`. A client asks for the room of one store only."""
        return await self._room.evict(store_id, tier, need_bytes)

    async def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> list[str]:
        """See `DirectoryRoom.shrink`."""
        return await self._room.shrink(store_id, tier, excess_bytes)

    async def keep_house(self, store_id: str) -> Upkeep:
        """See `DirectoryService.keep_house`. Raises what a shard fails with when all do."""
        answers = await self._gather(
            {shard: actor.keep_house.remote(store_id) for shard, actor in enumerate(self.shards)}
        )
        upkeep = Upkeep({tier: [] for tier in TIERS}, {}, _failures(answers.values()))
        if len(upkeep.failures) == len(answers):
            raise upkeep.failures[0]
        for shard, answer in answers.items():
            if isinstance(answer, HouseRound):
                for tier, extent_ids in answer.gone.items():
                    upkeep.gone[tier].extend(extent_ids)
                if self._known_ids[shard] != answer.directory_id:
                    upkeep.new_ids[shard] = answer.directory_id
                self._room.note(shard, answer.idle_s)
        return upkeep

    async def extent_ids_of(self, store_id: str, tier: Tier) -> list[str]:
        """Raises what a shard fails with, since what it has cannot be told."""
        answers = await self._gather(
            {shard: actor.extent_ids_of.remote(store_id, tier) for shard, actor in enumerate(self.shards)}
        )
        _raise_first(_failures(answers.values()))
        return [extent_id for answer in answers.values() for extent_id in answer]

    # For people

    async def stats(self) -> dict[str, Any]:
        """See `DirectoryService.stats`; sums over the shards. Raises what one fails with."""
        answers = await self._gather({shard: actor.stats.remote() for shard, actor in enumerate(self.shards)})
        _raise_first(_failures(answers.values()))
        total: dict[str, Any] = _sum_of(list(answers.values()))
        return total

    # How

    def _of_chain(self, keys: Sequence[bytes]) -> Actor:
        return self.shards[shard_of_chain(keys, len(self.shards))]

    def _of_extent(self, extent_id: str) -> Actor:
        return self.shards[shard_of_extent(extent_id, len(self.shards))]

    def _hold_id(self, own_id: int, shard: int) -> int:
        return hold_id_of(own_id, shard, len(self.shards))

    async def _adopt(self, copies: Sequence[Copy], among: Iterable[int]) -> tuple[list[str], dict[int, Exception], int]:
        """What was refused by shards among these, the failures of others of them, and how many were asked."""
        mine: dict[int, list[Copy]] = {shard: [] for shard in among}
        for copy in copies:
            shard = shard_of_extent(copy.info.extent_id, len(self.shards))
            if shard in mine:
                mine[shard].append(copy)
        answers = await self._gather(
            {shard: self.shards[shard].adopt.remote(pack_copies(some)) for shard, some in mine.items() if some}
        )
        refused = [extent_id for answer in answers.values() if isinstance(answer, list) for extent_id in answer]
        failures = {shard: answer for shard, answer in answers.items() if isinstance(answer, Exception)}
        return refused, failures, len(answers)

    async def _gather(self, calls: dict[int, Awaitable[Any]]) -> dict[int, Any]:
        """What each shard answers, or what it fails with."""
        answers = await asyncio.gather(*map(_answer_or_failure, calls.values()))
        return dict(zip(calls, answers, strict=True))

    def _take_released(self, shard: int) -> list[int]:
        released, self._released[shard] = self._released[shard], []
        if self._release_timer is not None and not any(self._released):
            self._release_timer.cancel()
            self._release_timer = None
        return released


async def _answer_or_failure(call: Awaitable[Any]) -> Any:
    try:
        return await ask(call)
    except STORE_FAILURES as error:
        return error


def _failures(answers: Iterable[Any]) -> list[Exception]:
    return [answer for answer in answers if isinstance(answer, Exception)]


def _raise_first(failures: Iterable[Exception]) -> None:
    """Nothing when there are none."""
    for failure in failures:
        raise failure


def _sum_of(values: Sequence[Any]) -> Any:
    """Of numbers, or of dicts of them, key by key."""
    if not isinstance(values[0], dict):
        return sum(values)
    keys = dict.fromkeys(key for value in values for key in value)
    return {key: _sum_of([value[key] for value in values if key in value]) for key in keys}
