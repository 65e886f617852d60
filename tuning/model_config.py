"""Shapes from Hugging Face's config.json, of a file or of a few models by name. Only JSON is read, no library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from kv.layout import DTYPE_BYTES
from kv.repeated_keys import RepeatedKeysError, load_json
from tuning.known_models import KNOWN_CONFIGS
from tuning.model_shape import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
"""Values of `model_type` whose shape is understood."""
_MAX_SIZE = 2**31 - 1

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class ModelConfigError(ValueError):
    """A model that is not known, or a config that is not understood. The message says which key, and what to do."""


def read_model_shape(name_or_path: str, dtype: str | None = None) -> ModelShape:
    """The shape of a model of `KNOWN_CONFIGS`, or of the config.json that a path leads to (the file or its folder).

    Args:
        dtype: that weights and KV are served in; None for the checkpoint's.

    Raises:
        ModelConfigError: no such name or file, a dtype that is not in `kv.layout.DTYPE_BYTES`, or a config that
            `shape_of_config` refuses.
    """
    shape = _read_checkpoint_shape(name_or_path)
    if dtype is None:
        return shape
    if dtype not in DTYPE_BYTES:
        raise ModelConfigError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
    return replace(shape, dtype_bytes=DTYPE_BYTES[dtype])


def _read_checkpoint_shape(name_or_path: str) -> ModelShape:
    if name_or_path in KNOWN_CONFIGS:
        return shape_of_config(KNOWN_CONFIGS[name_or_path], name_or_path)
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        names = ", ".join(sorted(KNOWN_CONFIGS))
        raise ModelConfigError(f"{name_or_path!r} is no model known by name ({names}), and no config.json lies there")
    try:
        config = load_json(path.read_text(encoding="utf-8"))
    except RepeatedKeysError as error:
        raise ModelConfigError(f"{path}: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} can't be read as JSON ({error}): give a Hugging Face config.json") from error
    return shape_of_config(config, path.resolve().parent.name)


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes, under the given name, for whoever asks how long steps take.

    Raises:
        ModelConfigError: as `counted_shape`; a dtype that is not in `kv.layout.DTYPE_BYTES`, or windows of attention,
            which change times in a way that `ModelShape` can't express.
    """
    keys = _Keys(config, name)
    key = "dtype" if "dtype" in keys.config else "torch_dtype"
    dtype = keys.text(key).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        keys.refuse(key, f"one of {', '.join(DTYPE_BYTES)}")
    _refuse_windows(keys, keys.text("model_type"))
    return counted_shape(config, name, DTYPE_BYTES[dtype])


def counted_shape(config: Mapping[str, Any], name: str, dtype_bytes: int) -> ModelShape:
    """The same for whoever asks for memory alone, in a dtype of their own.

    Raises:
        ModelConfigError: another family than FAMILIES, a missing key, or one whose value changes sizes in a way that
            `ModelShape` can't express (experts, quantised weights).
    """
    keys = _Keys(config, name)
    family = keys.text("model_type")
    if family not in FAMILIES:
        keys.refuse("model_type", f"one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        keys.refuse("quantization_config", "none: give the config of the model whose weights are not quantised")
    _refuse_experts(keys)
    try:
        return _opt_shape(keys, dtype_bytes) if family == "opt" else _llama_shape(keys, family, dtype_bytes)
    except ModelConfigError:
        raise
    except ValueError as error:
        raise ModelConfigError(f"the config of {name}: {error}") from error


class _Keys:
    """A config whose values are checked as they are read."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        if not isinstance(config, Mapping):
            raise ModelConfigError(f"the config of {name} is no JSON object: give a Hugging Face config.json")
        self.config = config
        self.name = name

    def size(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key)
        if value is None:
            value = default
        if value is None:
            self._missing(key)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            self.refuse(key, f"an int from 1 to {_MAX_SIZE}")
        return value

    def switch(self, key: str, default: bool) -> bool:
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str:
        if key not in self.config:
            self._missing(key)
        value = self.config[key]
        if not isinstance(value, str):
            self.refuse(key, "text")
        return value

    def refuse(self, key: str, allowed: str) -> NoReturn:
        value = self.config.get(key)
        shown = "a list or an object" if isinstance(value, dict | list) else repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise ModelConfigError(f"the config of {self.name}: {key} is {shown}; allowed: {allowed}")

    def _missing(self, key: str) -> NoReturn:
        raise ModelConfigError(f"the config of {self.name} has no {key!r}, which the model's size depends on: add it")


def _refuse_experts(keys: _Keys) -> None:
    """Several MLPs, of which a token passes through few, make weights larger than the dense shape says."""
    for key in _EXPERT_COUNTS:
        if keys.config.get(key) not in (None, 0, 1):
            keys.refuse(key, "null, 0 or 1: experts are not modelled")


def _refuse_windows(keys: _Keys, family: str) -> None:
    """Windows shorter than the context make attention cheaper than the timing says, and KV smaller."""
    window = keys.config.get("sliding_window")
    used = keys.switch("use_sliding_window", False) if family in ("qwen2", "qwen3") else family == "mistral"
    if used and window is not None and window < keys.size("max_position_embeddings"):
        keys.refuse("sliding_window", "null, or no less than max_position_embeddings: windows are not modelled")


def _llama_shape(keys: _Keys, family: str, dtype_bytes: int) -> ModelShape:
    """Llama and what has its shape: gated MLP, RMS norms, rotary positions, grouped KV heads."""
    hidden, inner, layers = (keys.size(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads = keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    head_dim = keys.size("head_dim", default=hidden // heads)
    attention_bias = keys.switch("attention_bias", False)
    layer = 2 * hidden  # two norms
    if family == "qwen2" or attention_bias:
        layer += (heads + 2 * kv_heads) * head_dim
    if family != "qwen2" and attention_bias:
        layer += hidden
    if family == "qwen3":
        layer += 2 * head_dim  # norms of q and k
    if keys.switch("mlp_bias", False):
        layer += 2 * inner + hidden
    return ModelShape(
        name=keys.name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=keys.size("vocab_size"),
        max_context_tokens=keys.size("max_position_embeddings"),
        dtype_bytes=dtype_bytes,
        gated_mlp=True,
        tied_embeddings=keys.switch("tie_word_embeddings", False),
        other_parameters=layers * layer + hidden,
    )


def _opt_shape(keys: _Keys, dtype_bytes: int) -> ModelShape:
    """OPT: plain MLP, layer norms and linear layers with bias, a table of learned positions with two rows in front."""
    hidden, inner, layers = (keys.size(key) for key in ("hidden_size", "ffn_dim", "num_hidden_layers"))
    heads = keys.size("num_attention_heads")
    positions = keys.size("max_position_embeddings")
    embedded = keys.size("word_embed_proj_dim", default=hidden)
    projections = 0 if embedded == hidden else 2 * embedded * hidden
    bias = keys.switch("enable_bias", True)
    norm = 2 * hidden if keys.switch("layer_norm_elementwise_affine", True) else 0
    layer = 2 * norm + (4 * hidden + inner + hidden if bias else 0)
    last_norm = keys.switch("do_layer_norm_before", True) and not keys.switch("_remove_final_layer_norm", False)
    return ModelShape(
        name=keys.name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=keys.size("vocab_size"),
        max_context_tokens=positions,
        dtype_bytes=dtype_bytes,
        gated_mlp=False,
        tied_embeddings=keys.switch("tie_word_embeddings", True),
        other_parameters=layers * layer + (positions + 2) * hidden + projections + (norm if last_norm else 0),
        embedding_size=None if embedded == hidden else embedded,
    )
