"""What a tuning job was made with: trace, model, devices, prices, search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """The traffic that was replayed."""

    name: str
    requests: int
    span_s: float
    """From the first arrival to the last, as replayed."""
    rate_factor: float
    """Arrivals were made so many times as frequent as in the file."""
    mean_input_tokens: float
    mean_output_tokens: float
    block_tokens: int | None
    """None without reuse information, and so the next two."""
    different_blocks: int | None
    ideal_block_hit_ratio: float | None
    """Of a cache that never forgets."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model's shape."""

    name: str
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """What the profile of one device says, and how its times came about."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: float
    host_link_bytes_per_s: float
    network_bytes_per_s: float
    timing: str
    """In words: "peak figures times estimated shares", or "measured on M on DATE; fit off by 3 % on average"."""


@dataclass(frozen=True, slots=True)
class PriceFacts:
    """The price book."""

    name: str
    currency: str
    as_of: str
    source: str
    hours_per_month: float
    gpu_hour: float
    """Of one device of the hardware profile."""


@dataclass(frozen=True, slots=True)
class SearchFacts:
    """How points were looked for, and how each was simulated."""

    method: str
    seed: int
    budget: int
    """Evaluations that were allowed."""
    duplicates: int
    """Points asked for again, which cost nothing."""
    wall_s: float
    """How long the evaluations of this run took; what an interrupted run did before is not in it."""
    simulation_settings: dict[str, str]
    """What holds for all points, by name: "DRAM": "16 GiB", "partial_blocks": "hit"."""
