"""Attention with our own kernels, on a CPU: K and V are read where they lie in the pages, and nothing is gathered."""

from __future__ import annotations

import torch

from actors.engine.attention.interface import LayerKv
from actors.engine.attention.torch_backend import TorchAttention
from actors.engine.batch import StepBatch
from actors.engine.kernels.library import DTYPES, Kernels


class NativeAttention(TorchAttention):
    """See the module. Pages of other types than bfloat16 and float32 are torch's."""

    name = "native"

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels

    def _write(self, batch: StepBatch, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> None:
        if k.dtype not in DTYPES:
            super()._write(batch, k, v, kv)
        else:
            self._kernels.write_rows(batch, _with_whole_rows(k), _with_whole_rows(v), kv)

    def _attend(self, batch: StepBatch, q: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        if q.dtype not in DTYPES:
            return super()._attend(batch, q, kv)
        return self._kernels.attend(batch, _with_whole_rows(q), kv)


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] with each row contiguous."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
