"""What the global store is created with. Plain data, made from the app's settings."""

from __future__ import annotations

from dataclasses import dataclass

from kv.disk.settings import DiskSettings
from kv.policy.policy_file import PolicySpec


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """One application's; the same for the store of every node."""

    dram_bytes: int
    """KV in each node's object store at most."""
    disk: DiskSettings | None
    """The disk tier of each node; None for none."""
    policy: PolicySpec
    """How long what is stored stays, and what goes first."""
    pull_timeout_s: float
    """Until taking a worker's parts over is given up."""
    layer_groups: int
    """Groups of layers that KV is stored in, at least; fewer where the parts would be too small."""
    directory_shards: int
    """Actors that the directory is divided over."""
