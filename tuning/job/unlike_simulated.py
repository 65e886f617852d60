"""Where a configuration to serve with is not what was simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.model_config import ModelConfigError, read_model_shape
from tuning.model_shape import ModelShape


def unlike_simulated(settings: Mapping[str, Any], evaluator: DeploymentEvaluator) -> list[str]:
    """A warning for each that differs of the model, the tokens of a step and those of a block.

    A setting that is not given differs too: what the app takes then is not known here.

    Args:
        settings: of the application, in the mode that was simulated. In mode static steps of prefill are compared:
            those of decode take a token of each request.
    """
    role = _mapping(settings.get("monolithic" if evaluator.fixed.mode == "monolithic" else "prefill"))
    engine = {**_mapping(settings.get("engine")), **_mapping(role.get("engine"))}
    warnings = []
    model = settings.get("model")
    if not _is_same_model(model, evaluator.model):
        warnings.append(_warning("model", model, evaluator.model.name))
    for name, simulated in (
        ("max_batch_tokens", evaluator.options.max_batch_tokens),
        ("block_tokens", evaluator.trace.block_tokens),  # None without reuse: blocks play no part then
    ):
        if simulated is not None and engine.get(name) != simulated:
            warnings.append(_warning(name, engine.get(name), simulated))
    return warnings


def _warning(name: str, there: object, simulated: object) -> str:
    given = "is not given" if there is None else f"is {there!r}"
    return f"{name} {given} in the configuration to serve with, and {simulated} was simulated: predictions may be off"


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
