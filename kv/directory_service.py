"""A directory as its callers reach it: gives `kv.directory.Directory` a clock and a lock, and takes and gives bytes
(`kv.wire`). `kv.directory_actor` makes an actor of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kv.directory import Directory
from kv.extents import HouseRound, PutTicket, Room
from kv.metrics.readings import directory_readings
from kv.metrics.table import Readings
from kv.policy.policy_file import PolicySpec
from kv.tiers import TIERS, Tier
from kv.wire import pack_lookup, unpack_copies, unpack_extents, unpack_keys, unpack_request

_EXPIRED_AT_A_TIME = 1024


class DirectoryService:
    """Methods are those of `Directory` without `now_s`. What is bytes here is packed as `kv.wire` says.

    Args:
        shard: which part of the whole this is; says so to who reads the metrics.
        clock: seconds since whenever.
    """

    def __init__(
        self, policy: PolicySpec | None = None, shard: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._id = time.time_ns()
        self._shard = shard
        self._clock = clock
        self._directory = Directory(first_id=self._id, policy=policy)
        self._lock = threading.Lock()
        self._put_ended = threading.Condition(self._lock)

    def match_blocks(self, keys: bytes) -> int:
        with self._lock:
            return self._directory.match_blocks(unpack_keys(keys))

    def lookup(self, packed: bytes) -> bytes:
        """A `LookupRequest`; gives a `Lookup`."""
        request = unpack_request(packed)
        with self._lock:
            for lease_id in request.released:
                self._directory.release(lease_id)
            found = self._directory.lookup(request.keys, self._clock(), request.lease_s, request.skip_blocks)
        return pack_lookup(found)

    def renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        with self._lock:
            return self._directory.renew(lease_ids, self._clock(), lease_s)

    def release(self, lease_ids: Sequence[int]) -> None:
        with self._lock:
            for lease_id in lease_ids:
                self._directory.release(lease_id)

    def begin_put(self, keys: bytes, ttl_s: float) -> PutTicket:
        with self._lock:
            return self._directory.begin_put(unpack_keys(keys), self._clock(), ttl_s)

    def commit_put(self, put_id: int, extents: bytes) -> bool:
        infos = unpack_extents(extents)
        with self._put_ended:
            self._put_ended.notify_all()
            return self._directory.commit_put(put_id, infos, self._clock())

    def abort_put(self, put_id: int) -> None:
        with self._put_ended:
            self._put_ended.notify_all()
            self._directory.abort_put(put_id)

    def settle(self, keys: bytes, timeout_s: float) -> bool:
        """Wait until no live put is about to bring any of these blocks. False when some still is after `timeout_s`."""
        wanted = unpack_keys(keys)
        with self._put_ended:
            return self._put_ended.wait_for(lambda: not self._is_pending(wanted), timeout_s)

    def enroll(self, store_id: str) -> int:
        """For a store that starts, before anything else: what an earlier process of it held is forgotten. The id of
        this directory."""
        self.drop_store(store_id)
        return self._id

    def adopt(self, copies: bytes) -> list[str]:
        with self._lock:
            return self._directory.adopt(unpack_copies(copies), self._clock())

    def add_copy(self, extent_id: str, tier: Tier, num_bytes: int) -> bool:
        with self._lock:
            return self._directory.add_copy(extent_id, tier, num_bytes, self._clock())

    def evict(self, store_id: str, tier: Tier, need_bytes: int) -> Room:
        with self._lock:
            return self._directory.evict(store_id, tier, need_bytes, self._clock())

    def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> Room:
        with self._lock:
            return self._directory.shrink(store_id, tier, excess_bytes, self._clock())

    def keep_house(self, store_id: str) -> HouseRound:
        """For a store to call now and then."""
        with self._lock:
            now_s = self._clock()
            gone = self._directory.expire(store_id, now_s, _EXPIRED_AT_A_TIME)
            idle_s = {tier: self._directory.idle_s(store_id, tier, now_s) for tier in TIERS}
            return HouseRound(self._id, gone, idle_s)

    def drop_extent(self, extent_id: str) -> None:
        with self._lock:
            self._directory.drop_extent(extent_id)

    def drop_store(self, store_id: str) -> None:
        with self._lock:
            self._directory.drop_store(store_id)

    def set_policy(self, policy: PolicySpec) -> None:
        with self._lock:
            self._directory.set_policy(policy, self._clock())

    def extent_ids_of(self, store_id: str, tier: Tier) -> list[str]:
        with self._lock:
            return [info.extent_id for info in self._directory.extents_of(store_id, tier, self._clock())]

    def stats(self) -> dict[str, Any]:
        """Counters, and the gauges `num_blocks`, `num_leases`, `num_puts` (expired ones left out), `bytes_by_store`."""
        with self._lock:
            self._sweep_all()
            return {
                **asdict(self._directory.counters),
                "num_blocks": self._directory.num_blocks,
                "num_leases": self._directory.num_leases,
                "num_puts": self._directory.num_puts,
                "bytes_by_store": self._directory.bytes_by_store(),
            }

    def _readings(self) -> Readings:
        with self._lock:
            self._sweep_all()
            return directory_readings(self._directory, self._shard)

    def _is_pending(self, keys: Sequence[bytes]) -> bool:
        self._directory.sweep(self._clock())
        return self._directory.has_pending(keys)

    def _sweep_all(self) -> None:
        while self._directory.sweep(self._clock()):
            pass
