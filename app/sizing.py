"""How much memory a model and its KV take, and what a device has room for: arithmetic alone, no model and no device.

The room for KV follows the engine's own rule: what the given share of a GPU leaves beside the weights and a fixed
workspace, dealt in whole slabs, as many to each lane (layer and KV head). The engine measures what is free where this
module reckons, and rounds each layer's weights up to slabs: expect a slab a lane less here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

GPU_WORKSPACE_BYTES = 2 * GIB
"""What the engine keeps free on a GPU for activations, logits and the kernels' own memory."""

CUDA_CONTEXT_BYTES = GIB // 2
"""What CUDA and its libraries take of a GPU before anything is loaded: a round figure (ours)."""

DEFAULT_CPU_KV_BYTES = GIB
"""What the engine takes for KV on a CPU when nothing is said."""

FAMILIES = ("llama", "mistral", "opt", "qwen2", "qwen3")


class SizingError(ValueError):
    """A model whose shape can't be read, or a setting under which it can't fit; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on. Parameters count numbers, each tied one once."""

    layers: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    dtype: str
    """Of the checkpoint."""
    layer_parameters: int
    """In one layer."""
    outer_parameters: int
    """Outside the layers: embeddings, last norm, head."""

    @property
    def parameters(self) -> int:
        return self.outer_parameters + self.layers * self.layer_parameters

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of all layers and KV heads for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """What one worker's device holds beside the weights."""

    weight_bytes: int
    kv_bytes: int
    """What is taken for KV, in whole slabs."""
    blocks: int
    block_tokens: int
    longest_context_tokens: int
    """The longest request (prompt and answer) that fits and that model and settings allow."""
    longest_requests: int
    """How many requests of that length fit at once."""

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_tokens


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config.json describes.

    Raises: SizingError: another family than FAMILIES, or a key that is missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise SizingError(f"model_type is {family!r}; sizes are known for {', '.join(FAMILIES)}")
    try:
        return _opt_shape(config) if family == "opt" else _llama_shape(config, family)
    except KeyError as error:
        raise SizingError(f"the model's config has no {error.args[0]!r}, which its size depends on") from error


def _llama_shape(config: Mapping[str, Any], family: str) -> ModelShape:
    """Llama and what has its shape: gated MLP, RMS norms, rotary positions, grouped KV heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    query, key_value, inner = heads * head_dim, kv_heads * head_dim, config["intermediate_size"]
    in_bias = family == "qwen2" or config.get("attention_bias", False)
    out_bias = family != "qwen2" and config.get("attention_bias", False)
    layer = hidden * query + 2 * hidden * key_value + query * hidden + 3 * hidden * inner + 2 * hidden
    layer += (query + 2 * key_value if in_bias else 0) + (hidden if out_bias else 0)
    layer += 2 * head_dim if family == "qwen3" else 0  # norms of q and k
    layer += 2 * inner + hidden if config.get("mlp_bias", False) else 0
    matrices = 1 if config.get("tie_word_embeddings", False) else 2
    return ModelShape(
        layers=config["num_hidden_layers"],
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=config["max_position_embeddings"],
        dtype=_dtype_of(config),
        layer_parameters=layer,
        outer_parameters=matrices * config["vocab_size"] * hidden + hidden,
    )


def _opt_shape(config: Mapping[str, Any]) -> ModelShape:
    """OPT: plain MLP, layer norms with bias, a table of learned positions with two rows before the first."""
    hidden, heads, inner = config["hidden_size"], config["num_attention_heads"], config["ffn_dim"]
    embedded = config.get("word_embed_proj_dim") or hidden
    bias = 1 if config.get("enable_bias", True) else 0
    norm = 2 * hidden if config.get("layer_norm_elementwise_affine", True) else 0
    layer = 4 * (hidden * hidden + bias * hidden) + 2 * hidden * inner + bias * (inner + hidden) + 2 * norm
    outer = config["vocab_size"] * embedded * (1 if config.get("tie_word_embeddings", True) else 2)
    outer += (config["max_position_embeddings"] + 2) * hidden
    outer += 2 * embedded * hidden if embedded != hidden else 0
    last_norm = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    return ModelShape(
        layers=config["num_hidden_layers"],
        kv_heads=heads,
        head_dim=hidden // heads,
        max_context_tokens=config["max_position_embeddings"],
        dtype=_dtype_of(config),
        layer_parameters=layer,
        outer_parameters=outer + (norm if last_norm else 0),
    )


def _dtype_of(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def chosen_dtype(asked: str, checkpoint: str, *, on_gpu: bool) -> str:
    """What `auto` comes to: the checkpoint's dtype, but bfloat16 for float16 on a CPU, which has kernels for it."""
    if asked != "auto":
        return asked
    if checkpoint not in DTYPE_BYTES:
        return "float32"
    return "bfloat16" if checkpoint == "float16" and not on_gpu else checkpoint


def room_for_kv(
    shape: ModelShape,
    *,
    dtype: str,
    block_tokens: int,
    slab_pages: int,
    on_gpu: bool,
    device_bytes: int | None,
    utilization: float,
    kv_cache_bytes: int | None = None,
    kv_cache_blocks: int | None = None,
    max_context_tokens: int | None = None,
) -> DeviceRoom:
    """What a device has room for beside the weights.

    Args:
        shape: of the model; all its layers are on the device.
        dtype: of weights and KV.
        device_bytes: the device's memory; None: not limited (a CPU).
        utilization: share of a GPU's memory that may be used.
        kv_cache_bytes: memory for KV, kv_cache_blocks: blocks of KV; at most one. None: what is left on a GPU, else
            DEFAULT_CPU_KV_BYTES.
        max_context_tokens: the longest request that must fit; None: as long as the model and the memory allow.

    Raises: SizingError: the weights, the KV that was asked for, or one request of max_context_tokens do not fit.
    """
    weight_bytes = shape.parameters * DTYPE_BYTES[dtype]
    # One slab for each lane: the grain in which room for KV comes.
    slab_row_bytes = shape.kv_bytes_per_token(dtype) * block_tokens * slab_pages
    limit = device_bytes if device_bytes is None or not on_gpu else int(device_bytes * utilization)
    workspace = GPU_WORKSPACE_BYTES + CUDA_CONTEXT_BYTES if on_gpu else 0
    left = None if limit is None else limit - weight_bytes - workspace

    if left is not None and left <= 0:
        raise SizingError(
            f"the weights take {_gib(weight_bytes)} in {dtype} and the engine {_gib(workspace)} more, but "
            f"{_gib(limit or 0)} may be used on each device: take a smaller model or dtype, or a larger device"
        )
    if kv_cache_blocks is not None:
        wanted = -(-kv_cache_blocks // slab_pages) * slab_row_bytes
    elif kv_cache_bytes is not None:
        wanted = kv_cache_bytes
    else:
        wanted = left if left is not None and on_gpu else DEFAULT_CPU_KV_BYTES
    if left is not None and wanted > left:
        raise SizingError(
            f"{_gib(wanted)} for KV are asked for, but beside the weights ({_gib(weight_bytes)}) only {_gib(left)} are "
            "left: lower kv_cache_gib or kv_cache_blocks, or leave both out"
        )
    rows = wanted // slab_row_bytes
    if rows < 1:
        raise SizingError(
            f"{_gib(wanted)} are there for KV, and the least that the engine can use is {_gib(slab_row_bytes)} (one "
            f"slab of {slab_pages} pages of {block_tokens} tokens for each of {shape.layers * shape.kv_heads} lanes): "
            "raise kv_cache_gib or gpu_memory_utilization, or lower slab_pages"
        )
    blocks = rows * slab_pages if kv_cache_blocks is None else kv_cache_blocks
    longest = min(shape.max_context_tokens, blocks * block_tokens, max_context_tokens or shape.max_context_tokens)
    if max_context_tokens is not None and longest < max_context_tokens:
        reason = (
            f"the model was made for {shape.max_context_tokens} tokens"
            if longest == shape.max_context_tokens
            else f"the KV cache holds {blocks * block_tokens} tokens"
        )
        raise SizingError(f"max_context_tokens is {max_context_tokens}, but {reason}: lower it, or give KV more memory")
    return DeviceRoom(
        weight_bytes=weight_bytes,
        kv_bytes=rows * slab_row_bytes,
        blocks=blocks,
        block_tokens=block_tokens,
        longest_context_tokens=longest,
        longest_requests=blocks // -(-longest // block_tokens),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
