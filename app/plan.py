"""Works out, without a device and without weights, what a configuration has room for.

    python -m app.plan serve_configs/llama13b.yaml [--device-memory-gib 80] [--config path/to/config.json] [--json]

Also how many tokens of KV the store's tiers hold on each node. Refuses, with exit status 2, a configuration that
can't fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from actors.model_source import ALIASES
from actors.object_store_room import needed_bytes, room_problem
from actors.random_model import config_of, parse_random_name
from app.known_shapes import KNOWN_CONFIGS
from app.serve_config import read_serve_config
from app.settings import AppSettings, EngineSettings
from app.settings_error import SettingsError
from app.sizing import GIB, CheckpointShape, DeviceRoom, SizingError, chosen_dtype, room_for_kv, shape_of
from kv.exit_status import status_of
from kv.layout import DTYPE_BYTES
from migrate.load import Role


def read_shape(model: str, config_path: str | None = None) -> CheckpointShape:
    """The model's shape from `config_path`, the model's own folder, a random model's name or the table of known ones.

    Raises: SizingError: none of them has it, or what is there can't be read.
    """
    model = ALIASES.get(model.lower(), model)
    path = Path(config_path) if config_path is not None else Path(model).expanduser() / "config.json"
    if config_path is not None or path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SizingError(f"{path} can't be read as JSON: {error}") from error
        return shape_of(config)
    if model in KNOWN_CONFIGS:
        return shape_of(KNOWN_CONFIGS[model])
    try:
        random = parse_random_name(model)
    except ValueError as error:
        raise SizingError(str(error)) from error
    if random is not None:
        return shape_of(config_of(random))
    raise SizingError(
        f"the shape of model {model!r} is not known here: give its config.json with --config. Known by name: "
        + ", ".join(KNOWN_CONFIGS)
    )


def room_of(
    shape: CheckpointShape, engine: EngineSettings, *, on_gpu: bool, device_memory_gib: float | None
) -> DeviceRoom:
    """What one worker with these engine settings has room for.

    Raises: SizingError: it can't fit.
    """
    dtype = chosen_dtype(engine.dtype, shape.dtype, on_gpu=on_gpu)
    # As the engine chooses where flash-attn is installed: it has no kernels for float32.
    flash = on_gpu and engine.attention != "torch" and dtype != "float32"
    return room_for_kv(
        shape,
        dtype=dtype,
        block_tokens=engine.block_tokens or (256 if flash else 16),
        slab_pages=engine.slab_pages,
        on_gpu=on_gpu,
        device_bytes=None if device_memory_gib is None else int(device_memory_gib * GIB),
        utilization=engine.gpu_memory_utilization,
        kv_cache_bytes=None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * GIB),
        kv_cache_blocks=engine.kv_cache_blocks,
        max_context_tokens=engine.max_context_tokens,
    )


def plan(settings: AppSettings, shape: CheckpointShape, device_memory_gib: float | None = None) -> dict[str, Any]:
    """The arithmetic for every role that the settings' mode has, as plain data.

    Args:
        device_memory_gib: of one device; None: the settings' own `plan.device_memory_gib` for a GPU, and no limit for a
            worker on the CPU.

    Raises: SizingError: a role can't fit; the message begins with its name.
    """
    roles = {role: _plan_role(settings, role, shape, device_memory_gib) for role in settings.roles}
    return {
        "model": settings.model,
        "mode": settings.mode,
        "parameters": shape.parameters,
        "checkpoint_dtype": shape.dtype,
        "roles": roles,
        "store": _plan_store(settings, shape),
        "object_store_bytes": _plan_object_store(settings, roles.values()) if settings.has_store else None,
        "notes": list(_notes(settings, roles.values())),
    }


def _plan_role(
    settings: AppSettings, role: Role, shape: CheckpointShape, device_memory_gib: float | None
) -> dict[str, Any]:
    engine, workers = settings.engine_for(role), settings.role(role)
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and workers.num_gpus > 0)
    memory = settings.plan.device_memory_gib if on_gpu and device_memory_gib is None else device_memory_gib
    try:
        sharing = int(1 / workers.num_gpus + 1e-9) if on_gpu and 0 < workers.num_gpus < 1 else 1
        if sharing * engine.gpu_memory_utilization > 1:
            raise SizingError(
                f"num_gpus {workers.num_gpus:g} puts up to {sharing} workers on one device, and each would take "
                f"{engine.gpu_memory_utilization:g} of it: lower gpu_memory_utilization to at most {1 / sharing:.2f}"
            )
        room = room_of(shape, engine, on_gpu=on_gpu, device_memory_gib=memory)
    except SizingError as error:
        raise SizingError(f"{role}: {error}") from error
    dtype = chosen_dtype(engine.dtype, shape.dtype, on_gpu=on_gpu)
    return {
        "replicas": workers.replicas,
        "device": "cuda" if on_gpu else "cpu",
        "device_memory_gib": memory,
        "dtype": dtype,
        "weight_bytes": shape.parameters * DTYPE_BYTES[dtype],
        "kv_bytes_per_token": shape.kv_bytes_per_token(dtype),
        "kv_tokens": room.kv_tokens,
        **dataclasses.asdict(room),
    }


def _plan_store(settings: AppSettings, shape: CheckpointShape) -> dict[str, Any] | None:
    """Room of one node's store by tier; None where there is no store. Headers and checksums of parts are left out: they
    take less than one part in a thousand."""
    if not settings.has_store:
        return None
    writer = settings.roles[0]
    engine, workers = settings.engine_for(writer), settings.role(writer)
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and workers.num_gpus > 0)
    token_bytes = shape.kv_bytes_per_token(chosen_dtype(engine.dtype, shape.dtype, on_gpu=on_gpu))
    limits = {"dram": settings.store.dram_gib, "disk": settings.store.disk.limit_gib}
    return {tier: {"bytes": int(gib * GIB), "kv_tokens": int(gib * GIB) // token_bytes} for tier, gib in limits.items()}


def _plan_object_store(settings: AppSettings, roles: Iterable[dict[str, Any]]) -> int:
    """What Ray's object store should have on a node where all workers are.

    Raises: SizingError: `plan.object_store_gib` is less.
    """
    longest = [of["longest_context_tokens"] * of["kv_bytes_per_token"] for of in roles for _ in range(of["replicas"])]
    dram_bytes = int(settings.store.dram_gib * GIB)
    given_gib = settings.plan.object_store_gib
    if given_gib is not None and (problem := room_problem(int(given_gib * GIB), dram_bytes, longest)) is not None:
        raise SizingError(f"plan.object_store_gib: {problem}")
    return needed_bytes(dram_bytes, longest)


def _notes(settings: AppSettings, roles: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Of what fits and is of little use."""
    pools = [of["kv_bytes"] for of in roles for _ in range(of["replicas"])]
    dram_bytes = int(settings.store.dram_gib * GIB)
    if not settings.has_store or not dram_bytes or dram_bytes > sum(pools):
        return
    nodes = sum(pools) // dram_bytes + 1  # the fewest whose tiers are larger together
    where = f"on fewer than {nodes} nodes" if nodes <= len(pools) else "on however many nodes"
    yield (
        f"store.dram_gib is {settings.store.dram_gib:g}, and the workers' own pools take {sum(pools) / GIB:.2f} GiB in "
        f"all: {where}, the DRAM tier has no room for more than a second copy of what they hold"
    )


def _text(planned: dict[str, Any]) -> str:
    size = f"{planned['parameters']:,} parameters, {planned['checkpoint_dtype']} as published"
    lines = [
        f"model       {planned['model']}: {size}",
        f"mode        {planned['mode']}",
    ]
    for role, of in planned["roles"].items():
        memory = "" if of["device_memory_gib"] is None else f" of {of['device_memory_gib']:g} GiB"
        lines += [
            "",
            f"{role}: {of['replicas']} x {of['device']}{memory}, {of['dtype']}",
            f"  weights             {of['weight_bytes']:>18,} bytes  {of['weight_bytes'] / GIB:8.2f} GiB",
            f"  KV a token          {of['kv_bytes_per_token']:>18,} bytes",
            f"  KV cache            {of['kv_bytes']:>18,} bytes  {of['kv_bytes'] / GIB:8.2f} GiB",
            f"  blocks a device     {of['blocks']:>18,} of {of['block_tokens']} tokens = {of['kv_tokens']:,} tokens",
            f"  longest context     {of['longest_context_tokens']:>18,} tokens",
            f"  such requests       {of['longest_requests']:>18,} at once on each device",
        ]
    if planned["store"] is not None:
        lines += ["", "store, on each node:"]
        lines += [
            f"  {name:<19} {of['bytes']:>18,} bytes  {of['bytes'] / GIB:8.2f} GiB = {of['kv_tokens']:,} tokens"
            for name, of in planned["store"].items()
        ]
        room = planned["object_store_bytes"]
        lines.append(
            f"  Ray's object store  {room:>18,} bytes  {room / GIB:8.2f} GiB or more, if all workers are on one node"
        )
    for note in planned["notes"]:
        lines += ["", f"note: {note}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 with the reason on the error output."""
    parser = argparse.ArgumentParser(
        prog="python -m app.plan",
        description="Print what a configuration needs and has room for; needs no GPU and no weights. "
        "EQUIPOISE_OVERLAY is honoured as in serving.",
        epilog="example: python -m app.plan serve_configs/llama13b.yaml --device-memory-gib 40",
    )
    parser.add_argument("serve_config", help="file for `serve run` or `serve deploy`, or a RayService's")
    parser.add_argument("--config", help="the model's config.json, for a model that is not known by name")
    parser.add_argument("--device-memory-gib", type=float, help="of one device; default: plan.device_memory_gib")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    try:
        settings = read_serve_config(options.serve_config).settings
        planned = plan(settings, read_shape(settings.model, options.config), options.device_memory_gib)
    except (SettingsError, SizingError) as error:
        print(f"{options.serve_config}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(planned, indent=2) if options.json else _text(planned))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
