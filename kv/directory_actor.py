"""The directory as a Ray actor: gives `kv.directory.Directory` a clock and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray

from kv.directory import Directory
from kv.extents import Copy, ExtentInfo, Lookup, PutTicket
from kv.policy.policy_file import PolicySpec
from kv.tiers import Tier

_EXPIRED_AT_A_TIME = 1024


@ray.remote(num_cpus=0)
class DirectoryActor:
    """Methods are those of `Directory` without `now_s`; time is this process's own monotonic clock.

    It may be restarted: it then knows nothing, and every block is a miss until the stores notice (`keep_house`) and
    list anew what they have.
    """

    def __init__(self, policy: PolicySpec | None = None) -> None:
        self._id = time.time_ns()
        self._directory = Directory(first_id=self._id, policy=policy)
        self._put_ended = asyncio.Condition()

    async def match_blocks(self, keys: Sequence[bytes]) -> int:
        return self._directory.match_blocks(keys)

    async def lookup(self, keys: Sequence[bytes], lease_s: float, skip_blocks: int = 0) -> Lookup:
        return self._directory.lookup(keys, time.monotonic(), lease_s, skip_blocks)

    async def renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        return self._directory.renew(lease_ids, time.monotonic(), lease_s)

    async def release(self, lease_id: int) -> None:
        self._directory.release(lease_id)

    async def begin_put(self, keys: Sequence[bytes], ttl_s: float) -> PutTicket:
        return self._directory.begin_put(keys, time.monotonic(), ttl_s)

    async def commit_put(self, put_id: int, extents: Sequence[ExtentInfo]) -> bool:
        committed = self._directory.commit_put(put_id, extents, time.monotonic())
        await self._tell_put_ended()
        return committed

    async def abort_put(self, put_id: int) -> None:
        self._directory.abort_put(put_id)
        await self._tell_put_ended()

    async def settle(self, keys: Sequence[bytes], timeout_s: float) -> bool:
        """Wait until no live put is about to bring any of these blocks. False when some still is after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        async with self._put_ended:
            while self._is_pending(keys):
                try:
                    await asyncio.wait_for(self._put_ended.wait(), deadline_s - time.monotonic())
                except TimeoutError:
                    return not self._is_pending(keys)
        return True

    async def enroll(self, store_id: str) -> int:
        """For a store that starts, before anything else: what an earlier process of it held is forgotten. The id of
        this directory."""
        self._directory.drop_store(store_id)
        return self._id

    async def adopt(self, copies: Sequence[Copy]) -> list[str]:
        return self._directory.adopt(copies, time.monotonic())

    async def add_copy(self, extent_id: str, tier: Tier, num_bytes: int) -> bool:
        return self._directory.add_copy(extent_id, tier, num_bytes, time.monotonic())

    async def evict(self, store_id: str, tier: Tier, need_bytes: int) -> list[str]:
        return self._directory.evict(store_id, tier, need_bytes, time.monotonic())

    async def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> list[str]:
        """As `evict`; but when what can go is less than `excess_bytes`, all of that goes."""
        gone = self._directory.evict(store_id, tier, excess_bytes, time.monotonic())
        if not gone:
            while one := self._directory.evict(store_id, tier, 1, time.monotonic()):
                gone += one
        return gone

    async def keep_house(self, store_id: str) -> tuple[int, dict[Tier, list[str]]]:
        """For a store to call now and then: the id of this directory, another one after a restart, and what `expire`
        gave."""
        return self._id, self._directory.expire(store_id, time.monotonic(), _EXPIRED_AT_A_TIME)

    async def drop_extent(self, extent_id: str) -> None:
        self._directory.drop_extent(extent_id)

    async def drop_store(self, store_id: str) -> None:
        self._directory.drop_store(store_id)

    async def set_policy(self, policy: PolicySpec) -> None:
        self._directory.set_policy(policy, time.monotonic())

    async def extent_ids_of(self, store_id: str, tier: Tier) -> list[str]:
        return [info.extent_id for info in self._directory.extents_of(store_id, tier, time.monotonic())]

    async def stats(self) -> dict[str, Any]:
        """Counters, and the gauges `num_blocks`, `num_leases`, `num_puts` (expired ones left out), `bytes_by_store`."""
        while self._directory.sweep(time.monotonic()):
            await asyncio.sleep(0)
        return {
            **asdict(self._directory.counters),
            "num_blocks": self._directory.num_blocks,
            "num_leases": self._directory.num_leases,
            "num_puts": self._directory.num_puts,
            "bytes_by_store": self._directory.bytes_by_store(),
        }

    def _is_pending(self, keys: Sequence[bytes]) -> bool:
        self._directory.sweep(time.monotonic())
        return self._directory.has_pending(keys)

    async def _tell_put_ended(self) -> None:
        async with self._put_ended:
            self._put_ended.notify_all()
