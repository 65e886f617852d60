"""What a planner is told of one worker: its own instance's traffic over a period, and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Measured over one period. All traffic is that of the instance whose home the worker is, wherever it was computed;
    what a worker does for others follows from the placements. Where a figure is not known, 0 leaves it out of account.

    Raises:
        ValueError: a figure that is negative or not finite, or more live and cached blocks than blocks.
    """

    worker: str
    """Worker id, and so the id of the instance that is at home there."""
    memory_bytes: int
    """Device memory for weights of layers and for KV, whoever's they are."""
    total_blocks: int
    """Blocks of the instance's block manager: the least that any of its lanes has room for."""
    live_blocks: int = 0
    """Blocks of the instance's live requests."""
    cached_blocks: int = 0
    """Other blocks with content that a move takes along; they are room all the same."""
    prefill_tokens_per_s: float = 0.0
    """Uncached prompt tokens that arrived (`utilisation.offered_per_s`)."""
    prefilled_tokens_per_s: float = 0.0
    """Uncached prompt tokens that were computed."""
    decode_tokens_per_s: float = 0.0
    """Tokens to generate that arrived: in a steady state, tokens generated."""
    pending_prefill_tokens: float = 0.0
    """Uncached prompt tokens that are still to be computed, at the end of the period."""
    pending_decode_tokens: float = 0.0
    """Tokens that requests waiting for their first decode step are likely to generate, at the end of the period."""
    running: float = 0.0
    """Requests decoded in one step, mean over steps that decode."""
    prefill_step_tokens: float = 0.0
    """Prompt tokens of one step, mean over steps that have any."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "worker"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} of worker {self.worker!r} is {value}; it must be finite and 0 or more")
        if self.live_blocks + self.cached_blocks > self.total_blocks:
            raise ValueError(
                f"worker {self.worker!r} has {self.live_blocks} live and {self.cached_blocks} cached blocks of "
                f"{self.total_blocks}; they are some of all blocks"
            )
