"""The directory as a Ray actor: gives `kv.directory.Directory` a clock, and takes and gives bytes (`kv.wire`).

Its methods are plain functions, run by one thread one after the other: through an event loop each call would cost half
as much again. Only `settle`, which waits, has threads of its own. `kv.directory_client.DirectoryClient` calls it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import ray

from kv.directory import Directory
from kv.extents import PutTicket
from kv.metrics.ray_exporter import EXPORT_PERIOD_S, RayExporter
from kv.metrics.readings import directory_readings
from kv.policy.policy_file import PolicySpec
from kv.tiers import Tier
from kv.wire import pack_lookup, unpack_copies, unpack_extents, unpack_keys, unpack_request

_EXPIRED_AT_A_TIME = 1024
_WAITING_AT_A_TIME = 64
"""Pulls that wait for blocks of other pulls. More of them wait for a thread first, and then give up early."""


@ray.remote(num_cpus=0, concurrency_groups={"waiting": _WAITING_AT_A_TIME})  # type: ignore[call-overload]
class DirectoryActor:
    """Methods are those of `Directory` without `now_s`; time is this process's own monotonic clock. What is bytes here
    is packed as `kv.wire` says.

    It may be restarted: it then knows nothing, and every block is a miss until the stores notice (`keep_house`) and
    list anew what they have.
    """

    def __init__(self, policy: PolicySpec | None = None) -> None:
        self._id = time.time_ns()
        self._directory = Directory(first_id=self._id, policy=policy)
        self._lock = threading.Lock()
        self._put_ended = threading.Condition(self._lock)
        threading.Thread(target=self._export_metrics, name="metrics", daemon=True).start()

    def match_blocks(self, keys: bytes) -> int:
        with self._lock:
            return self._directory.match_blocks(unpack_keys(keys))

    def lookup(self, packed: bytes) -> bytes:
        """A `LookupRequest`; gives a `Lookup`."""
        request = unpack_request(packed)
        with self._lock:
            for lease_id in request.released:
                self._directory.release(lease_id)
            found = self._directory.lookup(request.keys, time.monotonic(), request.lease_s, request.skip_blocks)
        return pack_lookup(found)

    def renew(self, lease_ids: Sequence[int], lease_s: float) -> list[int]:
        with self._lock:
            return self._directory.renew(lease_ids, time.monotonic(), lease_s)

    def release(self, lease_ids: Sequence[int]) -> None:
        with self._lock:
            for lease_id in lease_ids:
                self._directory.release(lease_id)

    def begin_put(self, keys: bytes, ttl_s: float) -> PutTicket:
        with self._lock:
            return self._directory.begin_put(unpack_keys(keys), time.monotonic(), ttl_s)

    def commit_put(self, put_id: int, extents: bytes) -> bool:
        infos = unpack_extents(extents)
        with self._put_ended:
            self._put_ended.notify_all()
            return self._directory.commit_put(put_id, infos, time.monotonic())

    def abort_put(self, put_id: int) -> None:
        with self._put_ended:
            self._put_ended.notify_all()
            self._directory.abort_put(put_id)

    @ray.method(concurrency_group="waiting")
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
            return self._directory.adopt(unpack_copies(copies), time.monotonic())

    def add_copy(self, extent_id: str, tier: Tier, num_bytes: int) -> bool:
        with self._lock:
            return self._directory.add_copy(extent_id, tier, num_bytes, time.monotonic())

    def evict(self, store_id: str, tier: Tier, need_bytes: int) -> list[str]:
        with self._lock:
            return self._directory.evict(store_id, tier, need_bytes, time.monotonic())

    def shrink(self, store_id: str, tier: Tier, excess_bytes: int) -> list[str]:
        with self._lock:
            return self._directory.shrink(store_id, tier, excess_bytes, time.monotonic())

    def keep_house(self, store_id: str) -> tuple[int, dict[Tier, list[str]]]:
        """For a store to call now and then: the id of this directory, another one after a restart, and what `expire`
        gave."""
        with self._lock:
            return self._id, self._directory.expire(store_id, time.monotonic(), _EXPIRED_AT_A_TIME)

    def drop_extent(self, extent_id: str) -> None:
        with self._lock:
            self._directory.drop_extent(extent_id)

    def drop_store(self, store_id: str) -> None:
        with self._lock:
            self._directory.drop_store(store_id)

    def set_policy(self, policy: PolicySpec) -> None:
        with self._lock:
            self._directory.set_policy(policy, time.monotonic())

    def extent_ids_of(self, store_id: str, tier: Tier) -> list[str]:
        with self._lock:
            return [info.extent_id for info in self._directory.extents_of(store_id, tier, time.monotonic())]

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

    def _is_pending(self, keys: Sequence[bytes]) -> bool:
        self._directory.sweep(time.monotonic())
        return self._directory.has_pending(keys)

    def _sweep_all(self) -> None:
        while self._directory.sweep(time.monotonic()):
            pass

    def _export_metrics(self) -> None:
        """Runs in a thread of its own as long as the process does."""
        exporter = RayExporter()
        while True:
            with self._lock:
                self._sweep_all()
                readings = directory_readings(self._directory)
            exporter.export(readings)
            time.sleep(EXPORT_PERIOD_S)
