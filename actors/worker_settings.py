"""What a Worker is created with. Plain data, made from the app's settings."""

from __future__ import annotations

from dataclasses import dataclass

from actors.engine.config import EngineConfig
from migrate.load import Role


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker's."""

    model: str
    role: Role
    engine: EngineConfig
    torch_threads: int
    lease_s: float
    fetch_timeout_s: float
    pull_timeout_s: float = 5.0
    """The store's own limit for taking a request's parts over."""
    prefill_tokens_per_s: float = 1000.0
    """Prior of the measured rate."""
    owner_silence_s: float = 10.0
    """An ingress that has not asked for so long is gone; its requests are freed."""
    epoch: int = 0
