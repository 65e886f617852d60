"""Serve deployments: thin shells around a Worker (design decision D1).

A replica creates one Worker in its own placement group, joins the roster for it, and tells Serve when it is no longer
well. Requests do not pass through here: ingresses talk to the Worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.addresses import StoreAddress, WorkerAddress
from actors.messages import WorkerFacts
from actors.worker import Worker
from actors.worker_settings import WorkerSettings
from migrate.roster import Member, RosterError

JOIN_TIMEOUT_S = 3.0
"""A health check may take this much longer than the worker's own part of it."""
_CLOSE_TIMEOUT_S = 10.0

logger = logging.getLogger("ray.serve")


class WorkerServer:
    """What the three deployments have in common: all but the name that the dashboard shows."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it: the replica is ready when its worker is
        self, settings: WorkerSettings, control: Any, num_gpus: float, stall_timeout_s: float
    ) -> None:
        """`control`: Serve handle of the control deployment. Loads the model and joins the roster."""
        self._control = control
        self._stall_timeout_s = stall_timeout_s
        self._store: StoreAddress | None = None
        self._worker_id = f"{settings.role}-{serve.get_replica_context().replica_id.unique_id}"
        group = get_current_placement_group()
        strategy: Any = "DEFAULT" if group is None else PlacementGroupSchedulingStrategy(group)
        # Not detached: it ends with this replica, which owns it.
        actor: Any = ray.remote(num_cpus=0, num_gpus=num_gpus)(Worker)
        # A task a step and ingress: as task events they would fill the GCS by 40 KB a request (load_tests/LOG.md).
        options = {"scheduling_strategy": strategy, "enable_task_events": False}
        self._worker = actor.options(**options).remote(self._worker_id, settings)
        facts: WorkerFacts = await self._worker.facts.remote()
        self._member = Member(
            worker_id=self._worker_id,
            epoch=settings.epoch,
            role=settings.role,
            node_id=ray.get_runtime_context().get_node_id(),
            model_fingerprint=facts.fingerprint,
            block_tokens=facts.layout.block_tokens,
            total_blocks=facts.total_blocks,
            max_context_tokens=facts.max_context_tokens,
            handle=WorkerAddress(self._worker, facts),
        )
        await self._join()

    async def check_health(self) -> None:
        """Serve asks now and then; raising replaces the replica. Joins again, in case the roster was restarted."""
        await asyncio.wait_for(self._worker.check_health.remote(self._stall_timeout_s), self._stall_timeout_s)
        try:
            await asyncio.wait_for(self._stay(), JOIN_TIMEOUT_S)
        except RosterError:
            raise  # it was taken for dead and may not come back under this name: a new replica can
        except (RayError, RayServeException, TimeoutError) as error:
            # The control deployment's trouble is not this replica's: it goes on with the store it knows.
            logger.warning("worker %s could not join again: %s", self._worker_id, type(error).__name__)

    async def __del__(self) -> None:
        """Serve calls this when it stops the replica."""
        self._control.leave.remote(self._worker_id, self._member.epoch)
        with contextlib.suppress(RayError, TimeoutError):  # it may be why this replica stops
            await asyncio.wait_for(self._worker.close.remote(), _CLOSE_TIMEOUT_S)

    async def _stay(self) -> None:
        stores_version = 0 if self._store is None else self._store.version
        if not await self._control.is_well.remote(self._worker_id, self._member.epoch, stores_version):
            await self._join()

    async def _join(self) -> None:
        """The store first: a worker without one computes what was handed over to it, and cannot free it."""
        store: StoreAddress | None = await self._control.store_address.remote(self._member.node_id)
        if store is not None and store != self._store:
            await self._worker.use_store.remote(store)
            self._store = store
        await self._control.join.remote(self._member)


@serve.deployment
class PrefillServer(WorkerServer):
    """Computes prompts and hands their KV over."""


@serve.deployment
class DecodeServer(WorkerServer):
    """Takes KV over and generates."""


@serve.deployment
class MonolithicServer(WorkerServer):
    """Does both, with a cache of its own."""
