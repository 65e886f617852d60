"""How eagerly modules move."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """The planner's settings; docs/migration-planner.md says why the defaults are what they are.

    Raises:
        ValueError: a value that is not finite or out of its range, weights that do not add up to 1, or deltas that are
            not in the order `delta_home < delta_heads <= delta_layers`.
    """

    period_s: float = 2.0
    """Seconds between two plans."""
    window_s: float = 6.0
    """Seconds of traffic that each is made from."""
    busy_from: float = 0.7
    """Share of its time, or of its memory, from which a worker is short of it. Nothing of its own leaves one that is
    not, and what is away comes home."""
    delta_layers: float = 0.15
    """Distance of the most or least loaded worker's U from the mean above which layers are moved."""
    delta_heads: float = 0.08
    """The same above which heads are moved."""
    delta_home: float = 0.05
    """Modules go home when home, with all of them, has a U at most this far above the least loaded worker's."""
    latency_budget_s: float = 10.0
    """Longest time that a move may take."""
    rho: float = 1.5
    """A move must gain this many times what it costs."""
    min_gain: float = 0.05
    """By so much a move must lower the higher U of its two ends, however little it costs."""
    horizon_s: float = 30.0
    """Time for which today's load is taken to last; also the time in which a backlog is to be worked off."""
    cool_down_s: float = 15.0
    """Time after a move, well ended or not, in which nothing that it moved is moved again."""
    compute_weight: float = 0.8
    memory_weight: float = 0.2
    max_itl_ratio: float = 2.0
    """How many times today's inter-token latency, at most, a move may bring about at any worker."""
    memory_headroom: float = 1.25
    """Room that a destination must have, in blocks of live requests: for those that arrive and those that it has."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, low_allowed = _LOWEST.get(field.name, (0.0, False))
            if not (math.isfinite(value) and (value > low or (low_allowed and value == low))):
                bound = f"at least {low}" if low_allowed else f"above {low}"
                raise ValueError(f"{field.name} is {value}; it must be finite and {bound}")
        if not math.isclose(self.compute_weight + self.memory_weight, 1.0):
            raise ValueError(
                f"compute_weight={self.compute_weight} and memory_weight={self.memory_weight} must add up to 1, so "
                "that a delta means the same whatever they are"
            )
        if not self.delta_home < self.delta_heads <= self.delta_layers:
            raise ValueError(
                f"delta_home={self.delta_home}, delta_heads={self.delta_heads}, delta_layers={self.delta_layers}; "
                "allowed is delta_home < delta_heads <= delta_layers: what has come home must not be sent away at once"
            )


_LOWEST: Final = {
    "busy_from": (0.0, True),
    "delta_home": (0.0, True),
    "min_gain": (0.0, True),
    "cool_down_s": (0.0, True),
    "compute_weight": (0.0, True),
    "memory_weight": (0.0, True),
    "rho": (1.0, True),
    "max_itl_ratio": (1.0, True),
    "memory_headroom": (1.0, True),
}
"""By setting, its least value and whether that is allowed; all others must be above 0."""
