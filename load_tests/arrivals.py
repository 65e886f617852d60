"""When requests are sent: a plan made before the run, so that what the server does cannot change it.

- Closed loop: a fixed number in flight; the next request is sent when one ends. It measures what a server can do, but
  a slow server is sent less, so its latencies look better than its users would find them.
- Open loop: requests are sent at their times, whatever the server does. It measures what users get at a given load.

Pure: no clock, no I/O. `load_tests.driver` carries a plan out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ArrivalPlan:
    """When each request is due, in seconds from the start of the run (never falling), and how many may be in flight.

    `max_in_flight is None` means an open loop: no request waits for another one.
    """

    due_s: tuple[float, ...]
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"{self.max_in_flight} requests in flight; at least 1 is needed")
        if any(later < earlier for earlier, later in zip((0.0, *self.due_s), self.due_s, strict=False)):
            raise ValueError("arrival times must not be negative and must not fall; sort them first")

    @property
    def is_open_loop(self) -> bool:
        return self.max_in_flight is None


def closed_loop(requests: int, in_flight: int) -> ArrivalPlan:
    """All requests are due at once, and `in_flight` of them run at any time until none is left."""
    return ArrivalPlan(due_s=(0.0,) * requests, max_in_flight=in_flight)


def at_rate(requests: int, rate_per_s: float, seed: int | str, burstiness: float = 1.0) -> ArrivalPlan:
    """An open loop with independent gaps of mean `1 / rate_per_s`, the same for the same seed.

    Gaps are gamma-distributed of shape `burstiness`, as those of vLLM's `--burstiness`: 1 is a Poisson process, less
    comes in bursts (the gaps' deviation is `burstiness ** -0.5` of their mean), more is more regular.
    """
    if rate_per_s <= 0:
        raise ValueError(f"arrival rate is {rate_per_s} requests/s, must be above 0")
    if burstiness <= 0:
        raise ValueError(f"burstiness is {burstiness}, must be above 0; 1 is a Poisson process, less comes in bursts")
    rng = random.Random(f"arrivals/{seed}")
    gaps_s = (rng.gammavariate(burstiness, 1 / (rate_per_s * burstiness)) for _ in range(requests))
    return ArrivalPlan(tuple(itertools.accumulate(gaps_s)))


def at_times(times_s: Sequence[float]) -> ArrivalPlan:
    """An open loop at given times, in seconds from the start of the run (a recorded trace's, for example)."""
    return ArrivalPlan(tuple(times_s))
