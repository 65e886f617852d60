"""A few Worker actors with a directory and a node store, without Serve: the app's own parts, quick to start."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray

from actors.addresses import StoreAddress, WorkerAddress
from actors.engine.config import EngineConfig
from actors.messages import WorkerFacts
from actors.worker import Worker
from actors.worker_settings import MoveLimits, WorkerSettings
from kv.directory_actor import DirectoryActor
from kv.node_store import NodeStore
from migrate.load import Role
from migrate.roster import Member
from tests.flow_client import FlowClient


@contextmanager
def worker_cell(
    model: str,
    roles: Mapping[Role, int],
    engine: EngineConfig,
    *,
    store_bytes: int = 200 << 20,
    share_prefixes: bool = True,
    moves: MoveLimits | None = None,
    **store_options: Any,
) -> Iterator[FlowClient]:
    """Starts so many workers of each role, and a store unless monolithic ones share nothing. `store_options`: more
    arguments of `NodeStore`."""
    actor: Any = ray.remote(num_cpus=0)(Worker)
    started: list[tuple[str, Role, Any]] = []
    for role, count in roles.items():
        for _ in range(count):
            worker_id = f"{role}-{uuid.uuid4().hex[:8]}"
            settings = WorkerSettings(
                model, role, engine, torch_threads=1, lease_s=30.0, fetch_timeout_s=30.0, pull_timeout_s=30.0,
                share_prefixes=share_prefixes, moves=moves,
            )  # fmt: skip
            started.append((worker_id, role, actor.remote(worker_id, settings)))
    directory_class: Any = DirectoryActor
    store_class: Any = NodeStore
    directory = store = None
    if share_prefixes or "monolithic" not in roles:
        directory = directory_class.remote()
        store = store_class.remote("node", [directory], store_bytes, **store_options)
    try:
        members = []
        for worker_id, role, handle in started:
            facts: WorkerFacts = ray.get(handle.facts.remote(), timeout=120)
            if store is not None:
                ray.get(handle.use_store.remote(StoreAddress((directory,), {"node": store}, "node")), timeout=30)
            members.append(
                Member(
                    worker_id=worker_id,
                    epoch=0,
                    role=role,
                    node_id="node",
                    model_fingerprint=facts.fingerprint,
                    block_tokens=facts.layout.block_tokens,
                    total_blocks=facts.total_blocks,
                    max_context_tokens=facts.max_context_tokens,
                    handle=WorkerAddress(handle, facts),
                )
            )
        mode = "monolithic" if "monolithic" in roles else "static"
        yield FlowClient(tuple(members), mode, directory, store)
    finally:
        for handle in [handle for _, _, handle in started] + [a for a in (store, directory) if a is not None]:
            ray.kill(handle)
