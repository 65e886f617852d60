"""What an instance of any kind has: a KV pool, a link to the store, and a measured rate of prefill."""

from __future__ import annotations

from typing import Final

from migrate.load import RateEstimate, Role, WorkerLoad
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.lane import Lane
from tuning.simulator.step_timing import StepTiming

RATE_HALF_LIFE_TOKENS: Final = 4096.0
"""As in the live workers."""
_FASTEST_TOKENS_PER_S: Final = 1e12


class Instance:
    """State that dispatch looks at, and links.

    Args:
        number: among all instances.
        budget: tokens of a step, for the rate that is assumed until one was measured.
    """

    def __init__(
        self, number: int, role: Role, pool: DevicePool, link_bytes_per_s: float, timing: StepTiming, budget: int
    ) -> None:
        self.number = number
        self.role: Role = role
        # Policies go by the order of ids.
        self.worker_id = f"{role}-{number:04d}"
        self.pool = pool
        self.link_in = Lane(link_bytes_per_s)
        """To the device."""
        self.link_out = Lane(link_bytes_per_s)
        self.running_requests = 0
        """That decode here."""
        self.reserved_requests = 0
        """On their way to decode here, and their blocks."""
        self.reserved_blocks = 0
        self.busy_s = 0.0
        budget_s = timing.step_s(((budget, 0),), 0, 0)
        prior = budget / budget_s if budget_s > 0 else _FASTEST_TOKENS_PER_S
        self.rate = RateEstimate(prior, RATE_HALF_LIFE_TOKENS)
        self._reported: tuple[int, int, float] | None = None
        self._load: WorkerLoad | None = None

    def load(self) -> WorkerLoad:
        """What it would report now. Work that has had no first token is in the dispatcher's reservations."""
        facts = (self.pool.held_blocks, self.running_requests, self.rate.per_s)
        if self._load is None or facts != self._reported:
            self._reported = facts
            self._load = WorkerLoad(
                worker_id=self.worker_id,
                epoch=0,
                role=self.role,
                total_blocks=self.pool.capacity_blocks,
                live_blocks=facts[0],
                running_requests=facts[1],
                waiting_requests=0,
                pending_prefill_tokens=0,
                prefill_tokens_per_s=facts[2],
                steps=0,
            )
        return self._load
