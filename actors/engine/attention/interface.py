"""What an attention backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from actors.engine.batch import StepBatch


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The lanes of one layer that take part in a call."""

    pages: torch.Tensor
    """The arena, [num_pages, 2, block_tokens, head_dim]: K is [:, 0], V is [:, 1]."""
    page_of: torch.Tensor
    """int64 [H, capacity in blocks]: page of each logical block, for the H KV heads of the call."""
    window: int | None
    """How many tokens back a token may attend, itself included; None: all."""
    scale: float


class AttentionBackend(Protocol):
    """Writes new K and V to pages and attends over them. One instance serves all layers of an engine.

    For a batch without prefills both calls can be captured in a CUDA graph: they wait for nothing on the device, take
    no shape from its values, and make whatever they keep for a step anew in `begin` or after it.
    """

    name: str

    def begin(self, batch: StepBatch) -> None:
        """Prepares what all layers of a step share. Called once before the step's first `attend`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """q [T, H * group, head_dim], k and v [T, H, head_dim], rotary applied, rows as in the batch of `begin`;
        returns [T, H * group, head_dim]. K and V of the rows are in their pages on return, and each row attends to all
        earlier tokens of its sequence and itself."""
