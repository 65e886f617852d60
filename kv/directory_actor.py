"""The directory, or one shard of it, as a Ray actor. `kv.directory_client.DirectoryClient` calls it.

Its methods are plain functions, run by one thread one after the other: through an event loop each call would cost half
as much again. Only `settle`, which waits, has threads of its own.
"""

from __future__ import annotations

import threading
import time

import ray

from kv.directory_service import DirectoryService
from kv.metrics.ray_exporter import EXPORT_PERIOD_S, RayExporter
from kv.policy.policy_file import PolicySpec

_WAITING_AT_A_TIME = 64
"""Pulls that wait for blocks of other pulls. More of them wait for a thread first, and then give up early."""


@ray.remote(num_cpus=0, concurrency_groups={"waiting": _WAITING_AT_A_TIME})  # type: ignore[call-overload]
class DirectoryActor(DirectoryService):
    """Time is this process's own monotonic clock.

    It may be restarted: it then knows nothing, and every block is a miss until the stores notice (`keep_house`) and
    list anew what they have.
    """

    def __init__(self, policy: PolicySpec | None = None, shard: int = 0) -> None:
        super().__init__(policy, shard)
        threading.Thread(target=self._export_metrics, name="metrics", daemon=True).start()

    def __repr__(self) -> str:
        """What Ray shows of it, in its dashboard and before its lines of the log."""
        return f"DirectoryActor({self._shard})"

    @ray.method(concurrency_group="waiting")
    def settle(  # type: ignore[override]  # Ray's decorator hides the signature
        self, keys: bytes, timeout_s: float
    ) -> bool:
        """See `DirectoryService`."""
        return super().settle(keys, timeout_s)

    def _export_metrics(self) -> None:
        """Runs in a thread of its own as long as the process does."""
        exporter = RayExporter()
        while True:
            exporter.export(self._readings())
            time.sleep(EXPORT_PERIOD_S)
