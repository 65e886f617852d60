"""The tokenizer of the served model."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from actors.model_source import resolve_model


def load_tokenizer(model: str) -> tuple[Any, str]:
    """The model's tokenizer, and the name that clients call the model by."""
    resolved = resolve_model(model)
    return AutoTokenizer.from_pretrained(resolved.path), resolved.name
