"""What a running app holds, and its processes: for tests that ask what is left, or that break something."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray import serve

from actors.addresses import RosterView
from tests.running_app import APP_NAME, RunningApp, wait_until

FREE_LIMIT_S = 8.0
"""Far above the second in which everything is to be free, for machines that are busy; below every limit after which
things are freed though nobody asked (10 s for a silent ingress, 30 s for a lease, 60 s for a tail)."""


def store_stats() -> dict[str, Any]:
    """Of the directory, and of each node's store."""
    control = serve.get_deployment_handle("ControlServer", APP_NAME)
    stats: dict[str, Any] = control.store_stats.remote().result(timeout_s=30)
    return stats


def directory() -> Any:
    """Handle of the directory's actor, where it is one."""
    (shard,) = shards()
    return shard


def shards() -> tuple[Any, ...]:
    """Handles of the directory's actors."""
    control = serve.get_deployment_handle("ControlServer", APP_NAME)
    view: RosterView = control.watch.remote(-1, 0.0).result(timeout_s=30)
    return view.directory


def store_process() -> psutil.Process:
    """Of the app's store on this node, whatever else runs on the machine. RayError while it is being started again."""
    control, node_id = serve.get_deployment_handle("ControlServer", APP_NAME), ray.get_runtime_context().get_node_id()
    return process_of(control.store_address.remote(node_id).result(timeout_s=30).stores[node_id])


def process_of(actor: Any) -> psutil.Process:
    """Where an actor runs now. RayError while it is being started again."""
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))


def held(app: RunningApp) -> dict[str, int]:
    """Whatever is held for requests anywhere; all zero when there are none."""
    counts: dict[str, int] = {}
    for stats, member in zip(app.stats(), app.members(), strict=True):
        for name in ("live_blocks", "live_requests", "tracked_requests"):
            counts[f"{member.worker_id}.{name}"] = stats[name]
    stored = store_stats()
    if stored:
        counts["leases"], counts["puts"] = stored["directory"]["num_leases"], stored["directory"]["num_puts"]
        # A store that is being started again holds none.
        counts["tails"] = sum(store.num_tails for store in stored["stores"].values() if store != "restarting")
    ingress = app.get("/debug/blocks")[1]
    return {**counts, "inflight": ingress["inflight_requests"], "queued": ingress["queued_requests"]}


def wait_free(app: RunningApp, limit_s: float = FREE_LIMIT_S) -> float:
    """Until nothing is held; returns how long that took."""
    left: dict[str, int] = {}

    def is_free() -> bool:
        left.clear()
        left.update({name: count for name, count in held(app).items() if count})
        return not left

    try:
        return wait_until(is_free, limit_s, "not all is free")
    except AssertionError as error:
        raise AssertionError(f"{error}: {left}") from error


def reported(app: RunningApp, role: str, name: str) -> int:
    """A number of the workers' last reports, summed over a role."""
    return sum(worker[name] for worker in app.get("/debug/blocks")[1]["workers"] if worker["role"] == role)


def processes(title: str) -> list[psutil.Process]:
    """Processes of the tests' Ray cluster whose title begins so, such as `ray::NodeStore`."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


def unique_bytes(title: str) -> int:
    """Memory that only these processes have: shared pages, such as the object store's, are left out."""
    return sum(process.memory_full_info().uss for process in processes(title))


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    """The process does nothing meanwhile, as under a debugger or on an overloaded machine."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def replica(deployment: str, replica_id: str = "") -> Any:
    """Handle of a Serve replica's actor; of any one, unless an id is given."""
    prefix = f"SERVE_REPLICA::{APP_NAME}#{deployment}#{replica_id}"
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith(prefix):
            return ray.get_actor(named["name"], namespace=named["namespace"])
    raise LookupError(f"no replica {replica_id!r} of {deployment} runs")
