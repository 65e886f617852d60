"""The control deployment: the roster of workers, and the actors of the global store.

One replica. It owns the directory and the node stores, so that they live as long as it does and end with the app. When
it restarts, workers join again by themselves and the store begins empty. When one of the actors crashes, Ray starts it
again under the same handle: a shard of the directory then knows no block, and a store has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Literal

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.addresses import RosterView, StoreAddress, address_of
from actors.moves.control_links import ControlLinks
from actors.object_store_room import room_problem
from actors.store_settings import StoreSettings
from actors.worker_settings import MoveLimits
from kv.directory_actor import DirectoryActor
from kv.directory_client import DirectoryClient
from kv.node_store import NodeStore
from kv.ray_failures import GONE_FOR_GOOD
from kv.store_stats import StoreStats
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import Move
from migrate.placement_state import PlacementState
from migrate.roster import Member, Roster

_STORE_ACTOR = {"max_restarts": -1, "enable_task_events": False}
"""Started again however often it crashes. It has several tasks a request, which would fill the GCS as task events."""
_PING_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_S = 10.0
"""Less than Serve gives a replica to end (graceful_shutdown_timeout_s, 20 by default)."""

logger = logging.getLogger("ray.serve")


@serve.deployment
class ControlServer:
    """See the module."""

    def __init__(self, store: StoreSettings | None, moves: MoveLimits | None = None) -> None:
        """`store` None: no global store, since monolithic workers share nothing. `moves` None: layers stay where they
        are."""
        self._roster = Roster()
        self._links = None if moves is None else ControlLinks(self._roster, moves)
        self._settings = store
        shard: Any = DirectoryActor
        self._shards: tuple[Any, ...] = ()
        if store is not None:
            self._shards = tuple(
                shard.options(**_STORE_ACTOR).remote(store.policy, number) for number in range(store.directory_shards)
            )
        self._directory = DirectoryClient(self._shards)
        self._stores: dict[str, Any] = {}
        self._stores_version = 0
        self._changed = asyncio.Condition()
        self._deaths: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._checks: set[asyncio.Task[None]] = set()

    async def store_address(self, node_id: str) -> StoreAddress | None:
        """Where the store of a node is, which is started if need be; None without one."""
        if self._settings is None:
            return None
        if node_id not in self._stores:
            store: Any = NodeStore
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            self._stores[node_id] = store.options(scheduling_strategy=here, **_STORE_ACTOR).remote(
                node_id,
                self._shards,
                self._settings.dram_bytes,
                disk=self._settings.disk,
                pull_timeout_s=self._settings.pull_timeout_s,
                layer_groups=self._settings.layer_groups,
            )
            self._stores_version += 1
        return StoreAddress(self._shards, dict(self._stores), node_id, self._stores_version)

    async def join(self, member: Member) -> None:
        """Lets a worker in (again): from now on it is sent requests. Raises RosterError."""
        before = self._roster.version
        self._roster.join(member)
        if self._roster.version != before:
            logger.info("worker %s joined on node %s", member.worker_id, member.node_id)
            key = (member.worker_id, member.epoch)
            self._deaths[key] = asyncio.create_task(self._await_death(member))
            await self._tell()
            if self._links is not None:
                self._links.prepare()
            check = asyncio.create_task(self._check_room(member.node_id))  # nobody waits for it, or fails with it
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
        elif self._roster.clear(member.worker_id, member.epoch):
            await self._tell()

    async def is_well(self, worker_id: str, epoch: int, stores_version: int) -> bool:
        """Word of a worker that has joined, which is listed again if it was suspected. False when it is to `join`
        again: it is not known here, or stores have come or gone since it was told of version `stores_version` (0: of
        none). Each worker says so every few seconds, so it is a call of few bytes."""
        if self._roster.clear(worker_id, epoch):
            await self._tell()
        return self._roster.is_current(worker_id, epoch) and stores_version == self._stores_version

    async def leave(self, worker_id: str, epoch: int) -> None:
        """Takes a worker out."""
        death = self._deaths.pop((worker_id, epoch), None)
        if death is not None and death is not asyncio.current_task():
            death.cancel()
        if self._roster.leave(worker_id, epoch):
            logger.info("worker %s left", worker_id)
            if self._links is not None:
                self._links.left(worker_id)
            await self._tell()

    async def suspect(self, worker_id: str, epoch: int) -> None:
        """An ingress could not reach a worker: it is not listed until it joins again (its health check does that)."""
        if self._roster.suspect(worker_id, epoch):
            await self._tell()

    async def watch(self, version: int, timeout_s: float) -> RosterView:
        """The roster as soon as it differs from `version`, or after `timeout_s` as it is."""
        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(lambda: self._roster.version != version), timeout_s)
        return RosterView(self._roster.version, self._roster.members(), self._shards)

    async def order_move(self, move: Move, home: str) -> MoveReport:
        """Has a move of the instance of worker `home` made. Raises MoveFailedError."""
        if self._links is None:
            raise MoveFailedError(f"{move}: layers move in mode balanced only")
        return await self._links.order(move, home)

    async def placements(self) -> dict[str, PlacementState | None]:
        """What each worker says of where its instance lies, None where it does not answer; empty where layers do not
        move."""
        return {} if self._links is None else await self._links.placements()

    async def check_health(self) -> None:
        """Serve asks now and then. A store that is gone for good (Ray does not start one again that was killed on
        purpose, or whose node is lost) is forgotten, and made anew for the next worker of its node that joins. The
        directory's shards cannot be replaced under those who have their handles: raising replaces this replica, and all
        with it."""
        for store_id, store in list(self._stores.items()):
            if await _is_gone(store):
                logger.warning("the store of node %s is gone", store_id)
                # Who does not know it any more could not find out; and what is listed is not stored again.
                self._directory.drop_store(store_id)
                del self._stores[store_id]
                self._stores_version += 1
        gone = await asyncio.gather(*map(_is_gone, self._shards))
        if any(gone):
            raise RuntimeError(f"shard {gone.index(True)} of the directory is gone")

    async def store_stats(self) -> dict[str, Any]:
        """Counters of the directory, all shards together, and by node what `stats_of_store` says; empty without a
        store."""
        if not self._shards:
            return {}
        stores = {store_id: await stats_of_store(store) for store_id, store in list(self._stores.items())}
        return {"directory": await self._directory.stats(), "stores": stores}

    async def __del__(self) -> None:
        """Serve calls this when it stops the replica, and with it the stores: what waits for a disk is written first,
        so that the next start finds it."""
        closing = [store.close.remote(_FLUSH_TIMEOUT_S) for store in self._stores.values()]
        done = asyncio.gather(*closing, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done, _FLUSH_TIMEOUT_S + _PING_TIMEOUT_S)

    async def _await_death(self, member: Member) -> None:
        """Ends when the worker's process does; that is when it leaves, whatever else was noticed."""
        try:
            await address_of(member).actor.wait_closed.remote()
        except RayError as error:
            logger.warning("worker %s died: %s", member.worker_id, type(error).__name__)
        await self.leave(member.worker_id, member.epoch)

    async def _check_room(self, node_id: str) -> None:
        """Warns of an object store that would spill KV. Ray reads that back, so it is no reason not to start."""
        if self._settings is None:
            return
        longest = [
            member.max_context_tokens * address_of(member).facts.layout.kv_bytes_per_token
            for member in self._roster.members()
            if member.node_id == node_id
        ]
        object_store_bytes = await asyncio.to_thread(object_store_bytes_of, node_id)
        if object_store_bytes is None:
            return
        problem = room_problem(object_store_bytes, self._settings.dram_bytes, longest)
        if problem is not None:
            logger.warning("node %s: %s (docs/disk-tier.md)", node_id, problem)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def object_store_bytes_of(node_id: str) -> int | None:
    """The size of a node's object store; None when the node is not there (any more). Asks Ray, and waits."""
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["NodeID"] == node_id and "object_store_memory" in node["Resources"]:
            return int(node["Resources"]["object_store_memory"])
    return None


async def stats_of_store(store: Any) -> StoreStats | Literal["restarting"]:
    """Of a store that is there, or that it is being started again: after a crash, or because its node is lost."""
    try:
        stats: StoreStats = await store.stats.remote()
    except (RayActorError, *GONE_FOR_GOOD):
        return "restarting"
    return stats


async def _is_gone(actor: Any) -> bool:
    """Whether an actor of the store is dead for good; one that is slow, or being started again, is not."""
    for _ in range(2):  # a call that was under way when the actor crashed may end the same way
        try:
            await asyncio.wait_for(actor.stats.remote(), _PING_TIMEOUT_S)
        except GONE_FOR_GOOD:
            continue
        except (RayError, TimeoutError):
            return False
        return False
    return True
