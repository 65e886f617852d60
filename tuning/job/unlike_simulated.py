"""Where a configuration to serve with is not what was simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.model_config import ModelConfigError, read_model_shape
from tuning.model_shape import ModelShape

_REMEDIES: Final = {
    "model": "simulate that one with --model, or give another --base-config",
    "max_batch_tokens": "simulate it with --max-batch-tokens {there}, or change it in --base-config",
    "max_running_requests": "simulate it with --max-running-requests {there}, or change it in --base-config",
    "block_tokens": "blocks are the trace's, so change it in --base-config where the engine allows it",
}


def unlike_simulated(settings: Mapping[str, Any], evaluator: DeploymentEvaluator) -> list[str]:
    """A warning for each that differs of the model, the tokens of a step, the requests of a batch and the tokens of a
    block.

    One for all that are not given: what the app takes then is not known here.

    Args:
        settings: of the application, in the mode that was simulated. In mode static steps of prefill are compared,
            since those of decode take a token of each request, and batches of decode.
    """
    monolithic = evaluator.fixed.mode == "monolithic"
    engine, decode_engine = (
        {**_mapping(settings.get("engine")), **_mapping(_mapping(settings.get(role)).get("engine"))}
        for role in (("monolithic", "monolithic") if monolithic else ("prefill", "decode"))
    )
    compared: list[tuple[str, object, object]] = [
        ("model", settings.get("model"), evaluator.model.name),
        ("max_batch_tokens", engine.get("max_batch_tokens"), evaluator.options.max_batch_tokens),
        (
            "max_running_requests",
            decode_engine.get("max_running_requests"),
            evaluator.options.max_running_requests,
        ),
    ]
    if evaluator.trace.block_tokens is not None:  # without reuse blocks play no part
        compared.append(("block_tokens", engine.get("block_tokens"), evaluator.trace.block_tokens))
    warnings = [
        f"{name} is {there!r} in the configuration to serve with, and {simulated} was simulated, so predictions may be "
        f"off: {_REMEDIES[name].format(there=there)}"
        for name, there, simulated in compared
        if there is not None and not (_is_same_model(there, evaluator.model) if name == "model" else there == simulated)
    ]
    missing = [(name, simulated) for name, there, simulated in compared if there is None]
    if missing:
        simulated_values = ", ".join(f"{name} {simulated}" for name, simulated in missing)
        warnings.append(
            f"{_listed([name for name, _ in missing])} not given in the configuration to serve with, which will take "
            f"the application's defaults. Simulated was {simulated_values}: give a --base-config that says so"
        )
    return warnings


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


def _mapping(value: object) -> dict[str, Any]:
    """Empty where something else stands in its place, which the app's check refuses."""
    return value if isinstance(value, dict) else {}
