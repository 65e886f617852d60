"""Where a configuration to serve with is not what was simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tuning.deployment.deployment import GIB
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.model_config import ModelConfigError, read_model_shape
from tuning.model_shape import ModelShape
from tuning.simulator.prompts import BLOCK_TOKENS_UNKNOWN
from tuning.timing import Timing

_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}

_ROOM: Final = "give --hardware whose memory_share leaves as much, or change it in --base-config"
_REMEDIES: Final = {
    "model": "simulate that one with --model, or give another --base-config",
    "max_batch_tokens": "simulate it with --max-batch-tokens {there}, or change it in --base-config",
    "max_running_requests": "simulate it with --max-running-requests {there}, or change it in --base-config",
    "block_tokens": "blocks are the trace's, so change it in --base-config where the engine allows it",
    "ingress.dispatch.policy": "simulate it with --dispatch {there}, or change it in --base-config",
    "store.share_prefixes": "change it in --base-config",
    "store.disk.admission": "change it in --base-config",
    "kv_cache_gib": _ROOM,
    "kv_cache_blocks": _ROOM,
    "gpu_memory_utilization": _ROOM,
    "dtype": "simulate it with --dtype {there}, or change it in --base-config",
}


def unlike_simulated(settings: Mapping[str, Any], evaluator: DeploymentEvaluator) -> list[str]:
    """A warning for each that differs of the model, the tokens of a step and those of a block, the requests that run at
    a time, the choice of workers, what the store is used for, and room for KV and its type where they are given.

    One for all that are not given: what the app takes then is not known here, but for what nobody has to give.

    Args:
        settings: of the application, in the mode that was simulated. In mode static steps of prefill are compared:
            those of decode take a token of each request. It is decode workers that requests run on.
    """
    mode, options = evaluator.fixed.mode, evaluator.options
    engine = _engine_of(settings, "monolithic" if mode == "monolithic" else "prefill")
    running = _engine_of(settings, "monolithic" if mode == "monolithic" else "decode").get("max_running_requests")
    compared: list[tuple[str, object, object]] = [
        ("model", settings.get("model"), evaluator.model.name),
        ("max_batch_tokens", engine.get("max_batch_tokens"), options.max_batch_tokens),
        ("max_running_requests", running, options.max_running_requests),
    ]
    if evaluator.trace.block_tokens is not None:  # without reuse blocks play no part
        compared.append(("block_tokens", engine.get("block_tokens"), evaluator.trace.block_tokens))
    dispatch = _mapping(_mapping(settings.get("ingress")).get("dispatch"))
    compared.append(("ingress.dispatch.policy", dispatch.get("policy", "load_aware"), options.dispatch))
    store = _mapping(settings.get("store"))
    compared.append(("store.share_prefixes", store.get("share_prefixes", True), True))
    compared.append(("store.disk.admission", _mapping(store.get("disk")).get("admission", "always"), "always"))
    for role in ("monolithic",) if mode == "monolithic" else ("prefill", "decode"):
        compared += _memory(_engine_of(settings, role), evaluator)
    warnings = [
        f"{name} is {there!r} in the configuration to serve with, and {simulated} was simulated, so predictions may be "
        f"off: {_REMEDIES[name].format(there=there)}"
        for name, there, simulated in compared
        if there is not None and not (_is_same_model(there, evaluator.model) if name == "model" else there == simulated)
    ]
    warnings = list(dict.fromkeys(warnings))  # what both roles have
    missing = [(name, simulated) for name, there, simulated in compared if there is None]
    if missing:
        simulated_values = ", ".join(f"{name} {simulated}" for name, simulated in missing)
        warnings.append(
            f"{_listed([name for name, _ in missing])} not given in the configuration to serve with, which will take "
            f"the application's defaults. Simulated was {simulated_values}: give a --base-config that says so"
        )
    return warnings


def _memory(engine: Mapping[str, Any], evaluator: DeploymentEvaluator) -> list[tuple[str, object, object]]:
    """What is given of a device's room for KV, and of the size of its elements, beside what was simulated."""
    model, hardware = evaluator.model, evaluator.hardware
    pool_tokens = Timing(model, hardware).kv_pool_tokens()
    simulated: dict[str, object] = {
        "kv_cache_gib": round(pool_tokens * model.kv_bytes_per_token / GIB, 2),
        "kv_cache_blocks": pool_tokens // (evaluator.trace.block_tokens or BLOCK_TOKENS_UNKNOWN),
        "gpu_memory_utilization": hardware.memory_share,
        "dtype": f"one of {model.dtype_bytes} bytes",
    }
    return [
        (name, engine[name], what)
        for name, what in simulated.items()
        if isinstance(engine.get(name), int | float | str)
        and not (name == "dtype" and _BYTES_OF.get(engine[name], model.dtype_bytes) == model.dtype_bytes)
    ]


def _listed(names: Sequence[str]) -> str:
    """With the verb: "a is", "a, b and c are"."""
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def _is_same_model(there: object, simulated: ModelShape) -> bool:
    """By shape where a folder or a known name is given, else by the last word of the Hub's name. Types may differ."""
    if not isinstance(there, str):
        return False
    try:
        shape = read_model_shape(there)
    except ModelConfigError:
        return _short_name(there) == _short_name(simulated.name)
    return replace(shape, name=simulated.name, dtype_bytes=simulated.dtype_bytes) == simulated


def _short_name(model: str) -> str:
    return model.rpartition("/")[2].lower().removesuffix("-hf")


def _engine_of(settings: Mapping[str, Any], role: str) -> dict[str, Any]:
    return {**_mapping(settings.get("engine")), **_mapping(_mapping(settings.get(role)).get("engine"))}


def _mapping(value: object) -> dict[str, Any]:
    """Empty where something else stands in its place, which the app's check refuses."""
    return value if isinstance(value, dict) else {}
