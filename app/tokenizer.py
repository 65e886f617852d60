"""What an ingress needs of the served model: its tokenizer, its name, and where its other files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from actors.model_source import resolve_model


class TokenizerSource(NamedTuple):
    """`tokenizer` is transformers' own; `name` is what clients call the model by unless settings say another; `folder`
    holds the model in Hugging Face's layout."""

    tokenizer: Any
    name: str
    folder: Path


def load_tokenizer(model: str) -> TokenizerSource:
    """Fetches or converts the model if it isn't here. Raises ModelSourceError."""
    resolved = resolve_model(model)
    return TokenizerSource(AutoTokenizer.from_pretrained(resolved.path), resolved.name, Path(resolved.path))
