"""`app.builder:build`, what `import_path` of every file in serve_configs/ names: from `args` to a bound application."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from actors.control import ControlServer
from actors.controller_server import ControllerServer
from actors.engine.config import EngineConfig
from actors.servers import JOIN_TIMEOUT_S, DecodeServer, MonolithicServer, PrefillServer
from actors.store_settings import StoreSettings
from actors.worker_settings import MoveLimits, WorkerSettings
from app.ingress import Ingress
from app.settings import AppSettings, EngineSettings, load_settings
from kv.disk.settings import DiskSettings
from kv.policy.admission import DiskAdmission
from migrate.load import Role

_GIB = 1 << 30
# The shells and the control replica wait for messages most of the time.
_SHELL_CPUS = 0.01
_NO_LIMIT = 100_000
_HEALTH_PERIOD_S = 2.0

_DEPLOYMENTS: dict[Role, Any] = {"prefill": PrefillServer, "decode": DecodeServer, "monolithic": MonolithicServer}


def build(args: dict[str, Any]) -> Application:
    """Checks `args` (raises SettingsError) and binds ingress, control and the mode's workers."""
    settings = load_settings(args)
    store = _store_settings(settings) if settings.has_store else None
    control = ControlServer.options(
        ray_actor_options={"num_cpus": _SHELL_CPUS},
        max_ongoing_requests=_NO_LIMIT,
        num_replicas=1,
        health_check_period_s=_HEALTH_PERIOD_S,
        logging_config={"enable_access_log": False},  # its callers are ours, and call every few seconds
    ).bind(store, _move_limits(settings))
    workers = [_bind_workers(settings, role, control) for role in settings.roles]
    controller = _bind_controller(settings, control) if settings.mode == "balanced" else None
    ingress = settings.ingress
    return Ingress.options(
        num_replicas=ingress.replicas,
        ray_actor_options={"num_cpus": ingress.num_cpus},
        # The ingress rejects by itself, with a reason and a time to come again.
        max_ongoing_requests=_NO_LIMIT,
        health_check_period_s=_HEALTH_PERIOD_S,
    ).bind(settings.model_dump(exclude_unset=True), control, workers, controller)


def _bind_controller(settings: AppSettings, control: Any) -> Any:
    return ControllerServer.options(
        num_replicas=1,
        ray_actor_options={"num_cpus": _SHELL_CPUS},
        health_check_period_s=_HEALTH_PERIOD_S,
        logging_config={"enable_access_log": False},  # what it does is in its log, and who asks is in the ingress's
    ).bind(settings.moves.controller(), control)


def _store_settings(settings: AppSettings) -> StoreSettings:
    store, disk = settings.store, settings.store.disk
    return StoreSettings(
        dram_bytes=int(store.dram_gib * _GIB),
        disk=DiskSettings(
            folder=disk.folder,
            limit_bytes=int(disk.limit_gib * _GIB),
            admission=DiskAdmission(disk.admission),
            remove_leftovers=disk.remove_leftovers,
        )
        if disk.limit_gib
        else None,
        policy=store.policy(),
        pull_timeout_s=store.pull_timeout_s,
        layer_groups=store.layer_groups,
        directory_shards=store.directory_shards,
    )


def _move_limits(settings: AppSettings) -> MoveLimits | None:
    return settings.moves.limits() if settings.mode == "balanced" else None


def _bind_workers(settings: AppSettings, role: Role, control: Any) -> Any:
    workers = settings.role(role)
    engine = settings.engine_for(role)
    num_gpus = workers.num_gpus
    worker = WorkerSettings(
        model=settings.model,
        role=role,
        engine=engine_config(engine, num_gpus),
        torch_threads=engine.torch_threads,
        lease_s=settings.store.lease_s,
        fetch_timeout_s=settings.store.fetch_timeout_s,
        pull_timeout_s=settings.store.pull_timeout_s,
        share_prefixes=settings.store.share_prefixes,
        max_publishing_answers=settings.store.max_publishing_answers,
        moves=_move_limits(settings),
    )
    # One bundle for shell and Worker together: they share a node, and the Worker takes what the shell leaves.
    bundle = {"CPU": max(workers.num_cpus, _SHELL_CPUS), **({"GPU": num_gpus} if num_gpus else {})}
    return (
        _DEPLOYMENTS[role]
        .options(
            num_replicas=workers.replicas,
            ray_actor_options={"num_cpus": _SHELL_CPUS},
            placement_group_bundles=[bundle],
            placement_group_strategy="STRICT_PACK",
            max_ongoing_requests=_NO_LIMIT,
            health_check_period_s=_HEALTH_PERIOD_S,
            health_check_timeout_s=settings.ingress.stall_timeout_s + 2 * JOIN_TIMEOUT_S,
        )
        .bind(worker, control, num_gpus, settings.ingress.stall_timeout_s)
    )


def engine_config(engine: EngineSettings, num_gpus: float) -> EngineConfig:
    """The engine's own config from the app's settings, for a worker that Ray gives `num_gpus` GPUs."""
    values = engine.model_dump(exclude={"kv_cache_gib", "torch_threads", "hosted_slice_ms"})
    if engine.device == "auto" and num_gpus == 0:
        values["device"] = "cpu"  # Ray hides no GPU from an actor that asked for none, so torch would see them all
    kv_cache_bytes = None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * _GIB)
    hosted_slice_s = None if engine.hosted_slice_ms is None else engine.hosted_slice_ms / 1000
    return EngineConfig(**values, kv_cache_bytes=kv_cache_bytes, hosted_slice_s=hosted_slice_s)
