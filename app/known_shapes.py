"""Shapes of a few well-known models by their Hub ids, so that a deployment can be planned before anything is
downloaded."""

from __future__ import annotations

from typing import Any

from tuning.known_models import KNOWN_CONFIGS as CONFIGS_BY_SHORT_NAME

_HUB_IDS = {
    "llama-2-7b": ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-7b-chat-hf"),
    "llama-2-13b": ("meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-13b-chat-hf"),
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
    "mistral-7b-v0.3": ("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"),
    "opt-125m": ("facebook/opt-125m",),
    "opt-13b": ("facebook/opt-13b",),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B",),
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct",),
}

KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    hub_id: CONFIGS_BY_SHORT_NAME[name] for name, hub_ids in _HUB_IDS.items() for hub_id in hub_ids
} | {
    # Its own config.json allows a shorter context than its base's.
    "Qwen/Qwen2.5-7B-Instruct": CONFIGS_BY_SHORT_NAME["qwen2.5-7b"] | {"max_position_embeddings": 32768},
}
"""By Hub id."""
