"""Layers of a step in one call of our kernels, in bfloat16.

With ten calls from Python a layer, a step of one row takes a fifth longer. What is computed is the same, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.batch import StepBatch
from actors.engine.kernels.library import Activation, Kernels
from actors.engine.model_spec import ModelSpec
from actors.engine.weights import LayerWeights

_WEIGHTS = (
    "attention_norm.weight", "attention_norm.bias", "qkv.weight", "qkv.bias", "q_norm.weight", "k_norm.weight",
    "o.weight", "o.bias", "mlp_norm.weight", "mlp_norm.bias", "up.weight", "up.bias", "down.weight", "down.bias",
)  # fmt: skip
PARTS = ("linear", "attention", "norm, rotary, activation")
"""Whose seconds are told apart, in the order of layers.cpp."""


class _Shape(ctypes.Structure):
    """As in layers.h, and so are the following ones."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "kv_heads", "head_dim", "block_tokens")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        *((name, ctypes.c_int) for name in ("rms", "pre_norm", "gated", "function")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name.replace(".", "_"), ctypes.c_void_p) for name in _WEIGHTS),
        ("page_of", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("window", ctypes.c_int64),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "before", "delta", "cos", "sin", "pages")),
        *((name, ctypes.c_void_p) for name in ("write_blocks", "write_offsets", "blocks", "context")),
        *((name, ctypes.c_void_p) for name in ("chunk_blocks", "chunk_rows", "chunk_context")),
        *((name, ctypes.c_void_p) for name in ("sampled", "seconds")),
        *((name, ctypes.c_int64) for name in ("rows", "decodes", "width", "chunks", "chunk_width", "num_sampled")),
    ]


@dataclass(slots=True)
class _Known:
    """A layer as it was when it was last run. What the pointers point to lives as long as this."""

    weights: LayerWeights
    page_of: torch.Tensor


class FusedLayers:
    """Runs layers of one instance. Used from one thread at a time.

    Args:
        max_rows: of a step, for which the kernels' products are meant.
    """

    def __init__(self, spec: ModelSpec, kernels: Kernels, function: Activation, max_rows: int) -> None:
        self.seconds: torch.Tensor | None = None
        """float64 [PARTS] that the CPU seconds of each are added to; None: they are not measured."""
        self._spec = spec
        self._kernels = kernels
        self._function = function
        self._max_rows = max_rows
        self._layers = (_Layer * spec.num_layers)()
        self._known: list[_Known | None] = [None] * spec.num_layers

    def takes(self, x: torch.Tensor) -> bool:
        """Whether `run` is for such a step: not too many rows, in bfloat16."""
        return x.dtype == torch.bfloat16 and x.shape[0] <= self._max_rows

    def run(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        first: int,
        layers: Sequence[tuple[LayerWeights, LayerKv]],
        rotation: tuple[torch.Tensor, torch.Tensor] | None,
        batch: StepBatch,
        sampled_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states x + delta, each [rows, hidden], before layer `first`, and the same after the last of `layers`,
        which are all of one instance and have all their KV heads here. Writes their K and V to pages. With
        `sampled_rows`, those of `batch`, only these come back: the last layer does nothing else for the others than
        their K and V."""
        for layer, (weights, kv) in enumerate(layers, first):
            self._know(layer, weights, kv)
        spec, kv = self._spec, layers[0][1]
        x = x.clone(memory_format=torch.contiguous_format)
        after = torch.empty_like(x)
        before = None if delta is None else delta.contiguous()
        cos, sin = (None, None) if rotation is None else rotation
        shape = _Shape(
            spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            kv.pages.shape[2], spec.norm_eps, kv.scale, spec.rms_norm, spec.pre_norm, spec.gated_mlp, self._function,
        )  # fmt: skip
        tensors = (
            x, before, after, cos, sin, kv.pages, batch.write_blocks, batch.write_offsets, batch.decode_blocks,
            batch.decode_context, batch.prefill_blocks, batch.prefill_rows, batch.prefill_context, sampled_rows,
            self.seconds,
        )  # fmt: skip
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        num_rows = x.shape[0] if sampled_rows is None else sampled_rows.shape[0]
        step = _Step(*pointers, x.shape[0], *batch.decode_blocks.shape, *batch.prefill_blocks.shape, num_rows)
        self._kernels.run_layers(shape, self._layers, first, len(layers), step)
        return x[:num_rows], after[:num_rows] if spec.pre_norm else None

    def _know(self, layer: int, weights: LayerWeights, kv: LayerKv) -> None:
        known = self._known[layer]
        if known is not None and known.weights is weights and known.page_of is kv.page_of:
            return
        tensors = (*(weights.get(role) for role in _WEIGHTS), kv.page_of)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._layers[layer] = _Layer(*pointers, kv.page_of.shape[1], kv.window or 0)
        self._known[layer] = _Known(weights, kv.page_of)
