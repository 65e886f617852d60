"""The model: embedding, ranges of layers, and the head, as calls that can be made apart.

Layers are run range by range, each over the lanes that lie on this worker, so that a placement can put layers and heads
elsewhere without another code path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from actors.engine.attention.interface import AttentionBackend, LayerKv
from actors.engine.batch import StepBatch, rows_of
from actors.engine.lane_table import LaneTable
from actors.engine.layer_ops import LayerOps
from actors.engine.model_spec import ModelSpec
from actors.engine.split_heads import StepHeads
from actors.engine.weights import LayerWeights


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
        ops: LayerOps,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.layers = layers
        self._outer = outer
        self._pages = pages
        self._lanes = lanes
        self._backend = backend
        # Whole layers attend with our kernels too.
        self._fused = ops.fused_layers() if backend.name == "native" else None
        self._frequencies = torch.tensor(spec.rotary_frequencies, dtype=torch.float32, device=pages.device)

    def forward(self, batch: StepBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """The whole model over one step: hidden states [T, hidden] before the head."""
        return self.run_layers(self.embed(batch), range(self.spec.num_layers), batch, before_layer)

    def forward_sampled(self, batch: StepBatch, before_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """`forward`, but only the rows that are sampled from, [S, hidden]. Of the others the last layer needs K and V
        alone, and our kernels leave the rest out: a thirtieth of a prompt for SmolLM2 *(ours)*."""
        layers = range(self.spec.num_layers)
        return self.run_layers(self.embed(batch), layers, batch, before_layer, sampled_rows=batch.sampled_rows)

    def embed(self, batch: StepBatch) -> torch.Tensor:
        """[T, hidden]"""
        x = F.embedding(batch.token_ids, self._outer["embedding.weight"])
        if "project_in.weight" in self._outer:
            x = self._linear(x, "project_in.weight")
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
        sampled_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs a range of layers that lie here over hidden states [T, hidden], writing their K and V to pages.
        `before_layer` is called with each one's number before it is run. `heads` attends where some lie elsewhere;
        HeadsLostError is its. With `sampled_rows`, those of `batch`, only these come back; then the last of `layers` is
        the model's."""
        self._backend.begin(batch)
        step = _Step(x.shape[0], self._rotation(batch.positions, x.dtype), heads)
        x, delta = self.ops.pad(x), None
        fused = self._fused if self._fused is not None and self._fused.takes(x) else None
        are_sampled = False
        for run, is_whole in _runs(layers, heads, one_by_one=before_layer is not None):
            if before_layer is not None:
                before_layer(run.start)
            if fused is not None and is_whole:
                parts = [(self.layers[layer], self._kv(layer)) for layer in run]
                wanted_rows = sampled_rows if run.stop == layers.stop else None
                x, delta = fused.run(x, delta, run.start, parts, step.rotation, batch, wanted_rows)
                are_sampled = wanted_rows is not None
                continue
            for layer in run:
                x, delta = self._layer(x, delta, layer, step)
        hidden = x if delta is None else x + delta
        if sampled_rows is None or are_sampled:
            return hidden[: step.num_rows]
        return rows_of(hidden[: step.num_rows], sampled_rows)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden] of the last layer -> logits [n, vocab]."""
        if self.spec.final_norm:
            x = self.ops.norm(x, self._outer.get("final_norm.weight"), self._outer.get("final_norm.bias"))
        if "project_out.weight" in self._outer:
            x = self._linear(x, "project_out.weight")
        return self._linear(x, "head.weight" if "head.weight" in self._outer else "embedding.weight")

    def _linear(self, x: torch.Tensor, role: str) -> torch.Tensor:
        return self.ops.linear(self.ops.pad(x), self._outer[role])[: x.shape[0]]

    def _layer(
        self, x: torch.Tensor, delta: torch.Tensor | None, layer: int, step: _Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states x + delta before the layer, and the same after it: the next norm adds them up in one go."""
        weights = self.layers[layer]
        attention_norm = weights.get("attention_norm.weight"), weights.get("attention_norm.bias")
        mlp_norm = weights.get("mlp_norm.weight"), weights.get("mlp_norm.bias")
        if not self.spec.pre_norm:
            _, x = self.ops.add_norm(x, self._attention(x, layer, weights, step), *attention_norm)
            return self.ops.add_norm(x, self._mlp(x, weights), *mlp_norm)[1], None
        if delta is None:
            normed = self.ops.norm(x, *attention_norm)
        else:
            x, normed = self.ops.add_norm(x, delta, *attention_norm)
        x, normed = self.ops.add_norm(x, self._attention(normed, layer, weights, step), *mlp_norm)
        return x, self._mlp(normed, weights)

    def _attention(self, x: torch.Tensor, layer: int, weights: LayerWeights, step: _Step) -> torch.Tensor:
        spec, ops = self.spec, self.ops
        qkv = ops.linear(x, weights["qkv.weight"], weights.get("qkv.bias"))
        qkv = qkv[: step.num_rows].view(step.num_rows, -1, spec.head_dim)
        q, k, v = qkv.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if "q_norm.weight" in weights:
            q, k = ops.norm(q, weights["q_norm.weight"], None), ops.norm(k, weights["k_norm.weight"], None)
        if step.rotation is not None:
            q, k = ops.rotate(q, *step.rotation), ops.rotate(k, *step.rotation)
        kv = self._kv(layer)
        if step.heads is None:
            out = self._backend.attend(q, k, v, kv)
        else:
            out = step.heads.attend(layer, q, k, v, kv, self._backend)
        return ops.linear(ops.pad(out.flatten(1)), weights["o.weight"], weights.get("o.bias"))

    def _kv(self, layer: int) -> LayerKv:
        return LayerKv(self._pages, self._lanes.pages(layer), self.spec.windows[layer], self.spec.head_dim**-0.5)

    def _mlp(self, x: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        up = self.ops.linear(x, weights["up.weight"], weights.get("up.bias"))
        return self.ops.linear(self.ops.activate(up), weights["down.weight"], weights.get("down.bias"))

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See _Step."""
        if self.spec.position_offset is not None:
            return None
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        scaling = self.spec.rotary_scaling
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _runs(layers: range, heads: StepHeads | None, *, one_by_one: bool) -> Iterator[tuple[range, bool]]:
    """Neighbouring layers that can be run in one call, and whether all heads of each lie here."""

    def kind(layer: int) -> tuple[bool, int]:
        return heads is None or heads.are_here(layer), layer if one_by_one else 0

    for (is_whole, _), run in itertools.groupby(layers, kind):
        numbers = list(run)
        yield range(numbers[0], numbers[-1] + 1), is_whole
