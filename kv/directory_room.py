"""How a store gets room from a directory in shards, each of which orders only what it knows of the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kv.actor_calls import Actor, ask
from kv.extents import Room
from kv.ray_failures import STORE_FAILURES
from kv.room_order import RoomOrder
from kv.tiers import Tier

_STEPS_PER_SHARD = 4
"""A large demand is met in steps, so that it takes from each shard what is oldest."""


class DirectoryRoom:
    """One store's. A shard that does not answer is asked last until it tells of itself again.

    Args:
        shards: handles of the `DirectoryActor`s, by their numbers.
        clock: seconds since whenever.
    """

    def __init__(self, shards: Sequence[Actor], clock: Callable[[], float]) -> None:
        self._shards = shards
        self._clock = clock
        self._order = RoomOrder(len(shards))

    def note(self, shard: int, idle_s: Mapping[Tier, float | None]) -> None:
        """What a shard said of its tiers, unasked for."""
        for tier, since_s in idle_s.items():
            self._order.note(shard, tier, since_s, self._clock())

    async def evict(self, store_id: str, tier: Tier, need_bytes: int) -> list[str]:
        """See `Directory.evict`. What one shard has not, several give together.

        Raises:
            What a shard fails with: the others have not enough.
        """
        could_go: dict[int, int] = {}
        failures: list[Exception] = []
        for shard in self._order.shards(tier):
            room = await self._ask(shard, "evict", store_id, tier, need_bytes)
            if isinstance(room, Exception):
                failures.append(room)
            elif room.extent_ids:
                return room.extent_ids
            else:
                could_go[shard] = room.num_bytes
        gone: list[str] = []
        if sum(could_go.values()) >= need_bytes:
            for shard in self._order.shards(tier):
                wanted_bytes = min(need_bytes, could_go.get(shard, 0))
                if wanted_bytes > 0:
                    room = await self._ask(shard, "evict", store_id, tier, wanted_bytes)
                    if isinstance(room, Room) and room.extent_ids:
                        gone += room.extent_ids
                        need_bytes -= room.num_bytes
        elif failures:
            raise failures[0]
        return gone

    async def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> list[str]:
        """See `Directory.shrink`.

        Raises:
            What a shard fails with, when all do.
        """
        step_bytes = excess_bytes
        if len(self._shards) > 1:
            step_bytes = -(-excess_bytes // (_STEPS_PER_SHARD * len(self._shards)))
        gone: list[str] = []
        failures: list[Exception] = []
        left = set(range(len(self._shards)))
        while excess_bytes > 0 and left:
            shard = next(shard for shard in self._order.shards(tier) if shard in left)
            room = await self._ask(shard, "shrink", store_id, tier, min(step_bytes, excess_bytes))
            if isinstance(room, Exception):
                failures.append(room)
                left.discard(shard)
            elif room.extent_ids:
                gone += room.extent_ids
                excess_bytes -= room.num_bytes
            else:
                left.discard(shard)
        if len(failures) == len(self._shards):
            raise failures[0]
        return gone

    async def _ask(self, shard: int, method: str, store_id: str, tier: Tier, num_bytes: int) -> Room | Exception:
        """What a shard gives, or what it fails with."""
        try:
            room: Room = await ask(getattr(self._shards[shard], method).remote(store_id, tier, num_bytes))
        except STORE_FAILURES as error:
            self._order.put_last(shard, tier)
            return error
        self._order.note(shard, tier, room.idle_s, self._clock())
        return room
