"""What the engine must know of a model: its shape and the few switches that tell the supported families apart.

Read from a Hugging Face config. Llama, Mistral, Qwen2, Qwen3 and OPT differ in their norm, their positions, their MLP
and in where norms stand; biases are told by the weights that are present.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "opt")
# Frequencies that do not depend on the length of the request being served.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class UnsupportedModelError(ValueError):
    """The model's family or one of its options is not served by this engine."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape and switches of one model. All sizes count elements; `max_context_tokens` is the model's own limit."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    norm_eps: float
    rms_norm: bool
    gated_mlp: bool
    activation: str
    pre_norm: bool
    final_norm: bool
    tied_embeddings: bool
    position_offset: int | None
    """Learned positions (OPT): row of position 0 in the table. None: rotary positions."""
    rotary_frequencies: tuple[float, ...]
    """Inverse frequencies, head_dim / 2 of them; empty with learned positions."""
    rotary_scaling: float
    windows: tuple[int | None, ...]
    """By layer: how many tokens back (itself included) a token may attend; None: all."""
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per KV head; KV head h serves query heads h * group_size and the following ones."""
        return self.num_heads // self.num_kv_heads


def read_model_spec(folder: Path) -> ModelSpec:
    """Reads `config.json` and `generation_config.json` of a Hugging Face folder; raises UnsupportedModelError."""
    config = AutoConfig.from_pretrained(folder)
    family = config.model_type
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModelError(
            f"{folder} holds a model of type {family!r}; the engine serves {', '.join(SUPPORTED_FAMILIES)}"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    opt = family == "opt"
    frequencies, scaling = ((), 1.0) if opt else _rotary(config, head_dim)
    return ModelSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_dim if opt else config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads if opt else config.num_key_value_heads,
        head_dim=head_dim,
        max_context_tokens=config.max_position_embeddings,
        norm_eps=1e-5 if opt else config.rms_norm_eps,
        rms_norm=not opt,
        gated_mlp=not opt,
        activation=config.activation_function if opt else config.hidden_act,
        pre_norm=not opt or config.do_layer_norm_before,
        final_norm=not opt or (config.do_layer_norm_before and not config._remove_final_layer_norm),
        tied_embeddings=config.tie_word_embeddings,
        position_offset=2 if opt else None,
        rotary_frequencies=frequencies,
        rotary_scaling=scaling,
        windows=_windows(config),
        eos_token_ids=_eos_token_ids(config, folder),
        checkpoint_dtype=str(config.dtype or torch.float32).removeprefix("torch."),
    )


def _rotary(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedModelError(f"rope_type {kind!r} is not served; allowed: {', '.join(SUPPORTED_ROPE_TYPES)}")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
    return tuple(frequencies.tolist()), float(scaling)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(config: Any, folder: Path) -> tuple[int, ...]:
    """The generation config's word goes before the model config's: chat models end turns with another token."""
    from transformers import GenerationConfig

    eos = config.eos_token_id
    if (folder / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id or eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
