"""What a layer computes besides attention, as operations that can be had from torch or from kernels of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from actors.engine.model_spec import ModelSpec, UnsupportedModelError
from actors.engine.row_padding import pad_rows

if TYPE_CHECKING:
    from actors.engine.kernels.fused_layers import FusedLayers

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class LayerOps(Protocol):
    """Operations over hidden states [T, width] of one model. No argument is changed."""

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """x with as many rows of zeros behind it as `linear` wants."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in], of as many rows as `pad` gives, times weight [out, in] transposed, plus bias [out]."""

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """The model's norm over the last dimension."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta, and its norm."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary embedding in the half-split convention of Hugging Face checkpoints: x [T, heads, head_dim], cos and
        sin [T, 1, head_dim]."""

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """The MLP's activation: up [T, inner], or [T, 2 * inner] with the gate first where the MLP is gated, to
        [T, inner]."""

    def fused_layers(self) -> FusedLayers | None:
        """What runs whole layers of one instance in one call, where that is to be had."""


class TorchLayerOps:
    """torch's own operators, on any device."""

    def __init__(self, spec: ModelSpec) -> None:
        if spec.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation {spec.activation!r} is not served; allowed: {', '.join(_ACTIVATIONS)}"
            )
        self.spec = spec
        self._activation = _ACTIVATIONS[spec.activation]

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """See LayerOps and `row_padding`."""
        return pad_rows(x)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See LayerOps."""
        return F.linear(x, weight, bias)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """See LayerOps."""
        if self.spec.rms_norm:
            return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.spec.norm_eps)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        x = x + delta
        return x, self.norm(x, weight, bias)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def activate(self, up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        if not self.spec.gated_mlp:
            return self._activation(up)
        gate, up = up.chunk(2, dim=-1)
        return self._activation(gate) * up

    def fused_layers(self) -> FusedLayers | None:
        """See LayerOps."""
        return None
