"""What the global store is created with. Plain data, made from the app's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One application's."""

    dram_bytes: int
    """KV in each node's object store at most."""
    pull_timeout_s: float
