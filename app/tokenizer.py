"""What an ingress needs of the served model: its tokenizer, its name, and where its other files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

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
    folder = Path(resolved.path)
    return TokenizerSource(read_tokenizer(folder), resolved.name, folder)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder in Hugging Face's layout, as `AutoTokenizer` reads it.

    `AutoTokenizer` imports torch, which nothing else in an ingress needs: 3 s of CPU and 240 MiB. It is left out where
    the folder names transformers' plain class, as those that were converted here do.
    """
    if _names_plain_class(folder):
        from transformers import TokenizersBackend

        return TokenizersBackend.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _names_plain_class(folder: Path) -> bool:
    """For Llama's model type only: for some others transformers knows better than the folder."""
    try:
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        model = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False  # transformers says what is wrong with it
    plain = tokenizer.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in tokenizer
    return bool(plain and model.get("model_type") == "llama")
