"""What the global store is created with. Plain data, made from the app's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One application's; the same for the store of every node."""

    dram_bytes: int
    """KV in each node's object store at most."""
    pull_timeout_s: float
    """Until taking a worker's parts over is given up."""
    layer_groups: int
    """Groups of layers that KV is stored in, at least; fewer where the parts would be too small."""
