"""A layer's operations with our own kernels, on a CPU in bfloat16 or float32; torch's where there is none."""

from __future__ import annotations

import torch

from actors.engine.kernels.fused_layers import FusedLayers
from actors.engine.kernels.library import Activation, InstructionSet, Kernels
from actors.engine.layer_ops import TorchLayerOps
from actors.engine.model_spec import ModelSpec

_ACTIVATIONS = {"silu": Activation.SILU, "relu": Activation.RELU}
_PRODUCT_ROWS = {InstructionSet.AVX2: 64, InstructionSet.AVX512: 64, InstructionSet.AMX: 128}
"""Rows of a bfloat16 product that ours takes no longer for than torch's, which reorders the weight in every call."""


class NativeLayerOps(TorchLayerOps):
    """See LayerOps. Products of a few rows need no padding: no code is generated for their shapes."""

    def __init__(self, spec: ModelSpec, kernels: Kernels) -> None:
        super().__init__(spec)
        self._kernels = kernels
        self._function = _ACTIVATIONS.get(spec.activation)
        self._product_rows = _PRODUCT_ROWS[kernels.instructions]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return x if x.shape[0] <= self._product_rows else super().pad(x)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See LayerOps."""
        if x.dtype == torch.bfloat16 and x.shape[0] <= self._product_rows and x.is_contiguous():
            return self._kernels.product(x, weight, bias)
        return super().linear(x, weight, bias)

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
        return FusedLayers(self.spec, self._kernels, self._function, self._product_rows)

    def _add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        return self._kernels.add_norm(x.contiguous(), delta, weight, bias, eps=spec.norm_eps, rms=spec.rms_norm)
