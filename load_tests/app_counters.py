"""Counters of a running application that its API does not show, read over Ray from the actors themselves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve

from actors.addresses import RosterView, WorkerAddress, address_of

APP_NAME = "equipoise"
"""In the configurations of serve_configs."""
_LIMIT_S = 30.0
_ASK_EVERY_S = 0.02


class AppError(Exception):
    """The application is not there, or is not what is to be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class AppSizes:
    """What does not change while the application runs."""

    block_tokens: int
    kv_bytes_per_token: int
    pool_tokens: int
    """KV that the one prefill worker's pool holds."""
    dram_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class AppCounts:
    """Counts since the start, and gauges."""

    fetched_tokens: int
    """KV that the prefill worker had from the store."""
    declined_tokens: int
    """Found by it in the store, and computed because that seemed faster."""
    disk_hit_blocks: int
    """Found by lookups where only a disk had them."""
    disk_read_extents: int
    live: int
    """Blocks and requests that are held by workers, leases, puts, and extents that wait to be written."""


def find_app(app_name: str = APP_NAME) -> tuple[Any, RosterView]:
    """The control deployment's handle and the roster of an application of the Ray cluster that this machine belongs to.

    Raises:
        AppError: there is no cluster, or the application does not answer.
    """
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise AppError(f"no Ray cluster was found ({error}): run this where the application runs") from error
    try:
        control = serve.get_deployment_handle("ControlServer", app_name)
        view: RosterView = control.watch.remote(-1, 0.0).result(timeout_s=_LIMIT_S)
    except Exception as error:  # Serve's, Ray's or a timeout: whichever, the application cannot be asked
        raise AppError(f"application {app_name!r} does not answer ({type(error).__name__}: {error})") from error
    return control, view


class AppCounters:
    """The application named `app_name` of the Ray cluster that this machine belongs to.

    Raises:
        AppError: there is none, it has no store with a disk tier, or not exactly one prefill worker and one store.
    """

    def __init__(self, app_name: str = APP_NAME) -> None:
        self._control, view = find_app(app_name)
        self._workers: list[WorkerAddress] = [address_of(member) for member in view.members]
        prefill = [address_of(member) for member in view.members if member.role == "prefill"]
        stats = self._store_stats()
        stores = list(stats["stores"].values()) if stats else []
        if len(prefill) != 1 or len(stores) != 1 or stores[0].disk is None:
            disks = sum(store.disk is not None for store in stores)
            raise AppError(
                f"there are {len(prefill)} prefill workers and {len(stores)} stores, {disks} of them with a disk tier: "
                "run mode static with prefill.replicas 1 on one node, and with store.disk.limit_gib above 0"
            )
        self._prefill = prefill[0]
        layout = self._prefill.facts.layout
        self.sizes = AppSizes(
            layout.block_tokens,
            layout.kv_bytes_per_token,
            self._prefill.facts.total_blocks * layout.block_tokens,
            stores[0].limit_bytes,
            stores[0].disk.limit_bytes,
        )

    def read(self) -> AppCounts:
        """The counts as they are now. Blocks: call it in a thread."""
        stats = self._store_stats()
        (store,) = stats["stores"].values()
        workers = ray.get([worker.actor.stats.remote() for worker in self._workers], timeout=_LIMIT_S)
        prefill = workers[self._workers.index(self._prefill)]
        directory = stats["directory"]
        held = sum(each["live_blocks"] + each["live_requests"] + each["tracked_requests"] for each in workers)
        return AppCounts(
            prefill["fetched_tokens"],
            prefill["fetch_declined_tokens"],
            directory["hit_blocks_disk"],
            store.disk.num_read_extents,
            held + directory["num_leases"] + directory["num_puts"] + store.disk.num_queued_extents,
        )

    async def when_quiet(self, limit_s: float = _LIMIT_S) -> AppCounts:
        """The counts when nothing is held for any request any more, and all that is to be on disk is.

        Raises:
            AppError: something still is after `limit_s`.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + limit_s
        while (counts := await asyncio.to_thread(self.read)).live:
            if loop.time() > deadline_s:
                raise AppError(f"{counts.live} things are still held after {limit_s:g} s: nobody else may use the app")
            await asyncio.sleep(_ASK_EVERY_S)
        return counts

    def _store_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._control.store_stats.remote().result(timeout_s=_LIMIT_S)
        if "restarting" in stats.get("stores", {}).values():
            raise AppError("the store of a node has crashed and is being started again: run this when it is there")
        return stats
