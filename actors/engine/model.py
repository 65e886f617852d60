"""The model: embedding, ranges of layers, and the head, as calls that can be made apart.

Layers are run range by range, each over the lanes that lie on this worker, so that a placement can put layers and heads
elsewhere without another code path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from actors.engine.attention.interface import AttentionBackend, LayerKv
from actors.engine.batch import StepBatch
from actors.engine.lane_table import LaneTable
from actors.engine.model_spec import ModelSpec, UnsupportedModelError
from actors.engine.row_padding import pad_rows
from actors.engine.split_heads import StepHeads
from actors.engine.weights import LayerWeights

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share."""

    num_rows: int
    """The batch's own rows; behind them hidden states may have padding, which attention never sees."""
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    """cos and sin [num_rows, 1, head_dim]; None for learned positions"""
    heads: StepHeads | None
    """None: all heads lie here"""


class CausalModel:
    """Weights and the functions over them. Holds no state of requests.

    `layers` maps the layer numbers that lie here to their weights; entries may come and go between steps.
    """

    def __init__(
        self,
        spec: ModelSpec,
        outer: Mapping[str, torch.Tensor],
        layers: dict[int, LayerWeights],
        pages: torch.Tensor,
        lanes: LaneTable,
        backend: AttentionBackend,
    ) -> None:
        if spec.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation {spec.activation!r} is not served; allowed: {', '.join(_ACTIVATIONS)}"
            )
        self.spec = spec
        self.layers = layers
        self._outer = outer
        self._pages = pages
        self._lanes = lanes
        self._backend = backend
        self._activation = _ACTIVATIONS[spec.activation]
        self._frequencies = torch.tensor(spec.rotary_frequencies, dtype=torch.float32, device=pages.device)

    def forward(self, batch: StepBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """The whole model over one step: hidden states [T, hidden] before the head."""
        return self.run_layers(self.embed(batch), range(self.spec.num_layers), batch, before_layer)

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """[T, hidden]"""
        x = F.embedding(batch.token_ids, self._outer["embedding.weight"])
        if "project_in.weight" in self._outer:
            x = F.linear(x, self._outer["project_in.weight"])
        if self.spec.position_offset is not None:
            x = x + F.embedding(batch.positions + self.spec.position_offset, self._outer["positions.weight"])
        return x

    def run_layers(
        self,
        x: torch.Tensor,
        layers: range,
        batch: StepBatch,
        before_layer: Callable[[int], None] | None = None,
        heads: StepHeads | None = None,
    ) -> torch.Tensor:
        """Runs a range of layers that lie here over hidden states [T, hidden], writing their K and V to pages.
        `before_layer` is called with each one's number before it is run. `heads` attends where some lie elsewhere;
        HeadsLostError is its."""
        self._backend.begin(batch)
        step = _Step(x.shape[0], self._rotation(batch.positions, x.dtype), heads)
        x = pad_rows(x)
        for layer in layers:
            if before_layer is not None:
                before_layer(layer)
            x = self._layer(x, layer, step)
        return x[: step.num_rows]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] of the last layer -> logits [n, vocab]."""
        num_rows = x.shape[0]
        x = pad_rows(x)
        if self.spec.final_norm:
            x = self._norm(x, self._outer.get("final_norm.weight"), self._outer.get("final_norm.bias"))
        if "project_out.weight" in self._outer:
            x = F.linear(x, self._outer["project_out.weight"])
        head = self._outer.get("head.weight")
        return F.linear(x, self._outer["embedding.weight"] if head is None else head)[:num_rows]

    def _layer(self, x: torch.Tensor, layer: int, step: _Step) -> torch.Tensor:
        weights = self.layers[layer]
        if self.spec.pre_norm:
            x = x + self._attention(self._layer_norm(x, weights, "attention_norm"), layer, weights, step)
            return x + self._mlp(self._layer_norm(x, weights, "mlp_norm"), weights)
        x = self._layer_norm(x + self._attention(x, layer, weights, step), weights, "attention_norm")
        return self._layer_norm(x + self._mlp(x, weights), weights, "mlp_norm")

    def _attention(self, x: torch.Tensor, layer: int, weights: LayerWeights, step: _Step) -> torch.Tensor:
        spec = self.spec
        qkv = F.linear(x, weights["qkv.weight"], weights.get("qkv.bias"))
        qkv = qkv[: step.num_rows].view(step.num_rows, -1, spec.head_dim)
        q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if "q_norm.weight" in weights:
            q = F.rms_norm(q, (spec.head_dim,), weights["q_norm.weight"], spec.norm_eps)
            k = F.rms_norm(k, (spec.head_dim,), weights["k_norm.weight"], spec.norm_eps)
        if step.rotation is not None:
            q, k = _rotate(q, *step.rotation), _rotate(k, *step.rotation)
        kv = LayerKv(self._pages, self._lanes.pages(layer), spec.windows[layer], spec.head_dim**-0.5)
        if step.heads is None:
            out = self._backend.attend(q, k, v, kv)
        else:
            out = step.heads.attend(layer, q, k, v, kv, self._backend)
        return F.linear(pad_rows(out.flatten(1)), weights["o.weight"], weights.get("o.bias"))

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        up = F.linear(x, weights["up.weight"], weights.get("up.bias"))
        if self.spec.gated_mlp:
            gate, up = up.chunk(2, dim=-1)
            up = self._activation(gate) * up
        else:
            up = self._activation(up)
        return F.linear(up, weights["down.weight"], weights.get("down.bias"))

    def _layer_norm(self, x: torch.Tensor, weights: LayerWeights, role: str) -> torch.Tensor:
        return self._norm(x, weights.get(f"{role}.weight"), weights.get(f"{role}.bias"))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if self.spec.rms_norm:
            return F.rms_norm(x, (x.shape[-1],), weight, self.spec.norm_eps)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.spec.norm_eps)

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See _Step."""
        if self.spec.position_offset is not None:
            return None
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        scaling = self.spec.rotary_scaling
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split convention of Hugging Face checkpoints; x [T, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
