"""A directory in shards within one process: the app's own client and services, with handles that call them at once, and
the time that the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError

from kv.directory import Directory
from kv.directory_client import DirectoryClient
from kv.directory_counters import DirectoryCounters
from kv.directory_service import DirectoryService
from kv.extents import Copy, ExtentInfo, Lookup, PutTicket
from kv.keys import KEY_BYTES
from kv.policy.policy_file import PolicySpec
from kv.shards import root_digits
from kv.tiers import TIERS, Tier

T = TypeVar("T")


class LocalShard:
    """Has what an actor's handle has: methods to call by `remote`, whose answers can be awaited."""

    def __init__(self, start: Callable[[], DirectoryService]) -> None:
        self._start = start
        self.service = start()
        self.is_dead = False
        """Every call fails."""
        self.calls: list[str] = []

    def restart(self) -> None:
        """What Ray does after a crash."""
        self.service = self._start()
        self.is_dead = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


class _Method:
    def __init__(self, shard: LocalShard, name: str) -> None:
        self._shard, self._name = shard, name

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        self._shard.calls.append(self._name)
        if self._shard.is_dead:
            answer.set_exception(ActorUnavailableError("it is being started again", None))
            answer.exception()  # not all callers wait for it
        else:
            answer.set_result(getattr(self._shard.service, self._name)(*arguments))
        return answer


class LocalDirectory:
    """Methods are those of `Directory`, over so many shards.

    Keys may be short, and extents may have any names: here they get what real ones have.
    """

    def __init__(self, num_shards: int, policy: PolicySpec | None = None) -> None:
        self._now_s = 0.0
        self.shards = [
            LocalShard(lambda number=number: DirectoryService(policy, number, clock=lambda: self._now_s))  # type: ignore[misc]
            for number in range(num_shards)
        ]
        self._loop = asyncio.new_event_loop()
        self.client = DirectoryClient(self.shards, clock=lambda: self._now_s)
        self._ids: dict[str, str] = {}

    def close(self) -> None:
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], now_s: float | None = None) -> T:
        self._now_s = self._now_s if now_s is None else now_s
        return self._loop.run_until_complete(work)

    def directories(self) -> list[Directory]:
        return [shard.service._directory for shard in self.shards]

    # Reading

    def match_blocks(self, keys: Sequence[bytes]) -> int:
        return self.run(self.client.match_blocks(_long(keys)))

    def lookup(self, keys: Sequence[bytes], now_s: float, lease_s: float, skip_blocks: int = 0) -> Lookup:
        found = self.run(self.client.lookup(_long(keys), lease_s, skip_blocks), now_s)
        slices = tuple(replace(piece, extent_id=_name(piece.extent_id)) for piece in found.slices)
        return replace(found, slices=slices)

    def renew(self, lease_ids: Iterable[int], now_s: float, lease_s: float) -> list[int]:
        return self.run(self.client.renew(list(lease_ids), lease_s), now_s)

    def release(self, lease_id: int) -> None:
        async def release() -> None:
            self.client.release(lease_id)
            self.client.send_released()

        self.run(release())

    # Writing

    def begin_put(self, keys: Sequence[bytes], now_s: float, ttl_s: float) -> PutTicket:
        return self.run(self.client.begin_put(_long(keys), ttl_s), now_s)

    def commit_put(self, put_id: int, extents: Sequence[ExtentInfo], now_s: float) -> bool:
        return self.run(self.client.commit_put(put_id, [self.real(info) for info in extents]), now_s)

    def abort_put(self, put_id: int) -> None:
        self.run(_awaited(lambda: self.client.abort_put(put_id)))

    def has_pending(self, keys: Iterable[bytes]) -> bool:
        return any(directory.has_pending(_long(keys)) for directory in self.directories())

    def adopt(self, copies: Sequence[Copy], now_s: float) -> list[str]:
        real = [replace(copy, info=self.real(copy.info)) for copy in copies]
        return list(map(_name, self.run(self.client.adopt(real), now_s)))

    def add_copy(self, extent_id: str, tier: Tier, num_bytes: int, now_s: float) -> bool:
        return self.run(self.client.add_copy(self._real_id(extent_id), tier, num_bytes), now_s)

    # Making room

    def evict(self, store_id: str, tier: Tier, need_bytes: int, now_s: float) -> list[str]:
        return list(map(_name, self.run(self.client.evict(store_id, tier, need_bytes), now_s)))

    def shrink(self, store_id: str, tier: Tier, excess_bytes: int, now_s: float) -> list[str]:
        return list(map(_name, self.run(self.client.shrink(store_id, tier, excess_bytes), now_s)))

    def expire(self, store_id: str, now_s: float, limit: int) -> dict[Tier, list[str]]:
        gone = [directory.expire(store_id, now_s, limit) for directory in self.directories()]
        return {tier: [_name(extent_id) for each in gone for extent_id in each[tier]] for tier in TIERS}

    def keep_house(self, store_id: str, now_s: float) -> None:
        """What a store does now and then."""
        self.run(self.client.keep_house(store_id), now_s)

    def drop_extent(self, extent_id: str) -> None:
        self.run(_awaited(lambda: self.client.drop_extent(self._real_id(extent_id))))

    def drop_store(self, store_id: str) -> None:
        self.run(_awaited(lambda: self.client.drop_store(store_id)))

    def set_policy(self, policy: PolicySpec, now_s: float) -> None:
        groups = tuple(replace(group, root=_long([group.root])[0]) for group in policy.groups)
        policy = replace(policy, groups=groups)
        for directory in self.directories():
            directory.set_policy(policy, now_s)

    def sweep(self, now_s: float) -> bool:
        swept = [directory.sweep(now_s) for directory in self.directories()]
        return any(swept)

    # What there is

    @property
    def counters(self) -> DirectoryCounters:
        stats = self.run(self.client.stats())
        return DirectoryCounters(**{field.name: stats[field.name] for field in fields(DirectoryCounters)})

    @property
    def num_blocks(self) -> int:
        return sum(directory.num_blocks for directory in self.directories())

    @property
    def num_leases(self) -> int:
        return sum(directory.num_leases for directory in self.directories())

    @property
    def num_puts(self) -> int:
        return sum(directory.num_puts for directory in self.directories())

    def extents_of(self, store_id: str, tier: Tier, now_s: float) -> list[ExtentInfo]:
        """Shard by shard."""
        return [
            _as_given(info) for directory in self.directories() for info in directory.extents_of(store_id, tier, now_s)
        ]

    def bytes_by_store(self) -> dict[str, dict[Tier, int]]:
        by_store: dict[str, dict[Tier, int]] = self.run(self.client.stats())["bytes_by_store"]
        return by_store

    # How

    def real(self, info: ExtentInfo) -> ExtentInfo:
        # An extent's own chain begins with the letter that its key begins with.
        root = _long([info.keys[0][:1]])[0]
        self._ids[info.extent_id] = f"{info.extent_id}-{root_digits(root)}"
        parent = None if info.parent is None else _long([info.parent])[0]
        return replace(info, extent_id=self._ids[info.extent_id], keys=_long(info.keys), parent=parent)

    def _real_id(self, extent_id: str) -> str:
        return self._ids.get(extent_id, f"{extent_id}-00000000")


def _long(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(key.ljust(KEY_BYTES, b"\0") for key in keys)


def _as_given(info: ExtentInfo) -> ExtentInfo:
    parent = None if info.parent is None else info.parent.rstrip(b"\0")
    keys = tuple(key.rstrip(b"\0") for key in info.keys)
    return replace(info, extent_id=_name(info.extent_id), keys=keys, parent=parent)


def _name(extent_id: str) -> str:
    return extent_id.rsplit("-", 1)[0]


async def _awaited(call: Callable[[], None]) -> None:
    call()
