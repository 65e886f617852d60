"""What a worker says of itself where layers move: where its instance lies, and what it does for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from migrate.placement import Placement


@dataclass(frozen=True, slots=True)
class HostedPart:
    """What a worker has of another's instance."""

    instance: str
    """Worker id of its home."""
    layers: tuple[int, ...]
    """Whose weights are here for it, ascending."""
    num_blocks: int
    """That each of its lanes was granted."""
    kv_bytes: int
    """That its lanes take."""
    layer_steps: Mapping[int, int]
    """By layer: steps for which it was run here, since the first grant."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """A link that lives. Bytes are of payloads, since the link was made."""

    epoch: int
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class PlacementState:
    """One worker, at one moment. This is the truth: who coordinates moves keeps none of his own."""

    placement: Placement
    """Of its own instance, whose id is the worker's."""
    under_way: str | None
    """The move or repair of its own instance that it is at, in words."""
    repairs: int
    """How often a host was lost, and its layers were taken home."""
    pool_blocks: int
    """Of its own instance's pool."""
    memory_bytes: int
    """For weights of layers and for KV, whoever's."""
    weight_bytes: int
    """Of layers that are here, whoever runs them."""
    kv_bytes: int
    """That its own lanes take here."""
    hosted: tuple[HostedPart, ...]
    """By instance."""
    granted_blocks: Mapping[str, int]
    """By worker that hosts parts of its instance: the blocks that it has room for."""
    links: Mapping[str, LinkState]
    """By peer."""
    layer_steps: tuple[int, ...]
    """[layer] steps of its own instance for which the layer was run here."""
