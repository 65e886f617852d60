"""Names of a checkpoint's tensors by the role they play in the engine, for each family.

Projections that read the same input are fused into one matrix: q, k and v (in that order), and gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.engine.model_spec import ModelSpec
from actors.engine.weights import Checkpoint, CheckpointError


@dataclass(frozen=True)
class _Names:
    layer: str
    """Prefix of layer {i}."""
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    o: str
    up: tuple[str, ...]
    down: str
    head_norms: tuple[tuple[str, str], ...]
    embedding: str
    final_norm: str


_LLAMA = _Names(
    layer="model.layers.{i}.",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    head_norms=(("q_norm", "self_attn.q_norm"), ("k_norm", "self_attn.k_norm")),
    embedding="model.embed_tokens",
    final_norm="model.norm",
)
_OPT = _Names(
    layer="model.decoder.layers.{i}.",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    head_norms=(),
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
)


def _names(spec: ModelSpec) -> _Names:
    return _OPT if spec.family == "opt" else _LLAMA


def read_layer(checkpoint: Checkpoint, spec: ModelSpec, layer: int) -> dict[str, torch.Tensor]:
    """One layer's tensors by role: `attention_norm`, `qkv`, `o`, `mlp_norm`, `up`, `down`, each `.weight` and, where
    the checkpoint has it, `.bias`; `q_norm.weight` and `k_norm.weight` for families that normalise heads."""
    names = _names(spec)
    prefix = names.layer.format(i=layer)
    fused = {
        "attention_norm": (names.attention_norm,),
        "qkv": names.qkv,
        "o": (names.o,),
        "mlp_norm": (names.mlp_norm,),
        "up": names.up,
        "down": (names.down,),
    }
    fused.update({role: (name,) for role, name in names.head_norms})
    tensors = {}
    for role, parts in fused.items():
        for kind in (".weight", ".bias"):
            present = [prefix + part + kind for part in parts if prefix + part + kind in checkpoint]
            if len(present) == len(parts):
                tensors[role + kind] = torch.cat([checkpoint.read(name) for name in present])
    for role in ("qkv", "o", "up", "down"):
        if f"{role}.weight" not in tensors:
            raise CheckpointError(
                f"{checkpoint.folder} lacks {', '.join(prefix + part + '.weight' for part in fused[role])}"
            )
    return tensors


def read_outer(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """What surrounds the layers: `embedding`, `final_norm`, `head` (absent when tied), and OPT's `positions`,
    `project_in` and `project_out`. They never move between workers."""
    names = _names(spec)
    wanted = {
        "embedding.weight": names.embedding + ".weight",
        "final_norm.weight": names.final_norm + ".weight",
        "final_norm.bias": names.final_norm + ".bias",
        "positions.weight": "model.decoder.embed_positions.weight",
        "project_in.weight": "model.decoder.project_in.weight",
        "project_out.weight": "model.decoder.project_out.weight",
    }
    if not spec.tied_embeddings:
        wanted["head.weight"] = "lm_head.weight"
    return {role: checkpoint.read(name) for role, name in wanted.items() if name in checkpoint}
