"""A layer's operations with our own kernels, on a CPU in bfloat16 or float32; torch's where there is none."""

from __future__ import annotations

import torch

from actors.engine.kernels.fused_layers import FusedLayers
from actors.engine.kernels.library import Activation, InstructionSet, Kernels
from actors.engine.layer_ops import TorchLayerOps
from actors.engine.model_spec import ModelSpec

_ACTIVATIONS = {"silu": Activation.SILU, "relu": Activation.RELU}
_PRODUCT_ROWS = {InstructionSet.AVX2: 64, InstructionSet.AVX512: 512, InstructionSet.AMX: 128}
"""Rows of a bfloat16 product that ours takes no longer for than torch's, which reorders the weight in every call. With
AVX512, 512 rows take the same within a twentieth; layers in one call and rows that do not see each other decide."""
_TILED_NUMBERS = 1 << 20
"""Of x, 2 MiB: up to there a product by whole tiles is faster than torch's. It reads x once for each panel of the
weight, from the second cache."""


class NativeLayerOps(TorchLayerOps):
    """See LayerOps. Products of a few rows need no padding: no code is generated for their shapes."""

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        super().__init__(spec)
        self._kernels = kernels
        self._function = _ACTIVATIONS.get(spec.activation)
        # All products of a layer are ours up to so many rows.
        self._layer_rows = min(
            self._product_rows(width, spec.head_dim)
            for width in (spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim)
        )

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return x if x.shape[0] <= self._layer_rows else super().pad(x)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See LayerOps."""
        rows, out = x.shape[0], weight.shape[0]
        if x.dtype == torch.bfloat16 and rows <= self._product_rows(x.shape[1], out) and x.is_contiguous():
            return self._kernels.product(x, weight, bias)
        return super().linear(super().pad(x), weight, bias)[:rows]

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """See LayerOps."""
        return self._add_norm(x, None, weight, bias)[1]

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        return self._add_norm(x, delta.contiguous(), weight, bias)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        x = x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
        return self._kernels.rotate(x, cos, sin)

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        if self._function is None:
            return super().activate(up)
        return self._kernels.activate(up.contiguous(), self._function, gated=self.spec.gated_mlp)

    def fused_layers(self) -> FusedLayers | None:
        """See LayerOps."""
        if self._function is None:
            return None
        return FusedLayers(self.spec, self._kernels, self._function, self._layer_rows)

    def _product_rows(self, width: int, out: int) -> int:
        """Rows of `width` numbers that a product with `out` columns is ours for."""
        rows = _PRODUCT_ROWS[self._kernels.instructions]
        if self._kernels.instructions is InstructionSet.AMX and width % 32 == 0 and out % 16 == 0:
            return max(rows, _TILED_NUMBERS // width)
        return rows

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        return self._kernels.add_norm(x.contiguous(), delta, weight, bias, eps=spec.norm_eps, rms=spec.rms_norm)
