"""What the simulator asks about a model on a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tuning.model_shape import ModelShape


class StepTiming(Protocol):
    """Seconds of steps; `tuning.timing.Timing` is one. See there."""

    model: ModelShape

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """A step of prompt chunks `(new tokens, cached tokens)` beside `batch` decodes over `context_tokens` in all."""

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """A step of decodes alone."""

    def decode_steps_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """So many of them; every sequence grows by a token a step."""

    def steps_within(self, batch: int, context_tokens: int, seconds: float) -> int:
        """The most of them that take no longer than `seconds`."""

    def kv_pool_tokens(self) -> int:
        """Tokens of KV that a device holds beside the weights."""


class InstantTiming:
    """A device on which nothing takes time: what is left is the cache."""

    def __init__(self, model: ModelShape) -> None:
        self.model = model

    def step_s(self, chunks: Iterable[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """0."""
        return 0.0

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """0."""
        return 0.0

    def decode_steps_s(self, batch: int, context_tokens: int, steps: int) -> float:
        """0."""
        return 0.0

    def steps_within(self, batch: int, context_tokens: int, seconds: float) -> int:
        """0: a batch is done when it begins, so nobody is left to ask about."""
        return 0

    def kv_pool_tokens(self) -> int:
        """More than any trace needs."""
        return 1 << 50
