"""What an attention backend does, and how one is chosen at run time."""

from __future__ import annotations

import importlib.util
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
    """Writes new K and V to pages and attends over them. One instance serves all layers of an engine."""

    name: str

    def begin(self, batch: StepBatch) -> None:
        """Prepares what all layers of a step share. Called once before the step's first `attend`."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: LayerKv) -> torch.Tensor:
        """q [T, H * group, head_dim], k and v [T, H, head_dim], rotary applied, rows as in the batch of `begin`;
        returns
        [T, H * group, head_dim]. K and V of the rows are in their pages on return, and each row attends to all earlier
        tokens of its sequence and itself."""


class BackendError(ValueError):
    """The backend that was asked for does not work here."""


def choose_backend(name: str, device: torch.device, block_tokens: int) -> AttentionBackend:
    """`auto` takes flash-attn on a CUDA device when it is installed and pages have a multiple of 256 tokens, else
    torch's
    own kernels."""
    from actors.engine.attention.torch_backend import TorchAttention

    if name not in ("auto", "torch", "flash"):
        raise BackendError(f"attention is {name!r}; allowed are auto, torch and flash")
    installed = importlib.util.find_spec("flash_attn") is not None
    fits = device.type == "cuda" and installed and block_tokens % 256 == 0
    if name == "flash" and not fits:
        raise BackendError(
            f"attention: flash needs a CUDA device (here {device.type}), the flash_attn package "
            f"({'installed' if installed else 'not installed: pip install flash-attn'}) and block_tokens a multiple "
            f"of 256 "
            f"(here {block_tokens}); use attention: torch otherwise"
        )
    if name == "torch" or not fits:
        return TorchAttention()
    from actors.engine.attention.flash import FlashAttention

    return FlashAttention()
