"""The tokenizer of the served model."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from actors.model_source import resolve_model


def load_tokenizer(model: str) -> tuple[Any, str]:
    """The model's tokenizer (of transformers), and the name that clients call the model by unless settings say another.

    Fetches or converts the model if it isn't here. Raises ModelSourceError.
    """
    resolved = resolve_model(model)
    return AutoTokenizer.from_pretrained(resolved.path), resolved.name
