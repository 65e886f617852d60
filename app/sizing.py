"""How much memory a model and its KV take, and what a device has room for: arithmetic alone, no model and no device.

The room for KV follows the engine's own rule: what the given share of a GPU leaves beside the weights and a fixed
workspace, dealt in whole slabs, as many to each lane (layer and KV head). The engine measures what is free where this
module reckons, and rounds each layer's weights up to slabs: expect a slab a lane less here and there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kv.layout import DTYPE_BYTES
from tuning.model_config import ModelConfigError, counted_shape
from tuning.model_shape import ModelShape

GIB = 1 << 30

GPU_WORKSPACE_BYTES = 2 * GIB
"""What the engine keeps free on a GPU for activations, logits and the kernels' own memory."""

CUDA_CONTEXT_BYTES = GIB // 2
"""What CUDA and its libraries take of a GPU before anything is loaded: a round figure (ours)."""

DEFAULT_CPU_KV_BYTES = GIB
"""What the engine takes for KV on a CPU when nothing is said."""


class SizingError(ValueError):
    """A model whose shape can't be read, or a setting under which it can't fit; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """What memory depends on."""

    sizes: ModelShape
    """In float32."""
    dtype: str
    """Of the checkpoint."""

    @property
    def parameters(self) -> int:
        """Numbers of the model, each tied one once."""
        return self.sizes.parameters

    def kv_bytes_per_token(self, dtype: str) -> int:
        """K and V of all layers and KV heads for one token."""
        return replace(self.sizes, dtype_bytes=DTYPE_BYTES[dtype]).kv_bytes_per_token


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


def shape_of(config: Mapping[str, Any]) -> CheckpointShape:
    """The shape that a Hugging Face config.json describes.

    Raises: SizingError: what `tuning.model_config.counted_shape` refuses.
    """
    try:
        sizes = counted_shape(config, "the model", DTYPE_BYTES["float32"])
    except ModelConfigError as error:
        raise SizingError(str(error)) from error
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return CheckpointShape(sizes, str(dtype).removeprefix("torch."))


def chosen_dtype(asked: str, checkpoint: str, *, on_gpu: bool) -> str:
    """What `auto` comes to: the checkpoint's dtype, but bfloat16 for float16 on a CPU, which has kernels for it."""
    if asked != "auto":
        return asked
    if checkpoint not in DTYPE_BYTES:
        return "float32"
    return "bfloat16" if checkpoint == "float16" and not on_gpu else checkpoint


def room_for_kv(
    shape: CheckpointShape,
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
            f"{_gib(limit or 0)} may be used on each device: take a smaller model or dtype, or a larger device "
            "(a worker has one device: there is no tensor parallelism)"
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
        lanes = shape.sizes.num_layers * shape.sizes.num_kv_heads
        raise SizingError(
            f"{_gib(wanted)} are there for KV, and the least that the engine can use is {_gib(slab_row_bytes)} (one "
            f"slab of {slab_pages} pages of {block_tokens} tokens for each of {lanes} lanes): "
            "raise kv_cache_gib or gpu_memory_utilization, or lower slab_pages"
        )
    blocks = rows * slab_pages if kv_cache_blocks is None else kv_cache_blocks
    longest = min(
        shape.sizes.max_context_tokens, blocks * block_tokens, max_context_tokens or shape.sizes.max_context_tokens
    )
    if max_context_tokens is not None and longest < max_context_tokens:
        reason = (
            f"the model was made for {shape.sizes.max_context_tokens} tokens"
            if longest == shape.sizes.max_context_tokens
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
