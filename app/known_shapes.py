"""Shapes of a few well-known models by their Hub ids, so that a deployment can be planned before anything is
downloaded."""

from __future__ import annotations

from typing import Any

from tuning.known_models import KNOWN_CONFIGS as CONFIGS_BY_SHORT_NAME

_SHORT_NAMES = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-13b-hf": "llama-2-13b",
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "facebook/opt-125m": "opt-125m",
    "facebook/opt-13b": "opt-13b",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m",
}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    hub_id: CONFIGS_BY_SHORT_NAME[name] for hub_id, name in _SHORT_NAMES.items()
}
"""By Hub id."""
