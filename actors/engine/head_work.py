"""Attention of some KV heads that another worker has: what is sent there and what comes back.

Unlike a stage's work (`stage_work`) it is for one layer, whose weights stay at home: q, k and v go, the heads' output
comes back, and the home joins it to its own heads' before the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actors.engine.batch import PackedStep


@dataclass(frozen=True, slots=True)
class HeadWork:
    """Heads for another worker to attend with, over the rows of one step. Tensors are contiguous, on the CPU, in the
    model's dtype, and only read."""

    instance: str
    """Worker id of the instance's home."""
    version: int
    """Of the placement."""
    step_id: int
    layer: int
    heads: range
    """KV heads, H of them, each with its query heads."""
    step: PackedStep
    fresh_blocks: torch.Tensor
    """As in StageWork."""
    q: torch.Tensor
    """[T, H * group, head_dim], rotary applied"""
    k: torch.Tensor
    """[T, H, head_dim]"""
    v: torch.Tensor
    """[T, H, head_dim]"""


@dataclass(frozen=True, slots=True)
class HeadDone:
    """The answer to a HeadWork."""

    instance: str
    version: int
    step_id: int
    layer: int
    out: torch.Tensor | None
    """[T, H * group, head_dim]; None with an `error`."""
    error: str | None = None
