"""An instance that computes prompts: they wait in the order in which they came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque

from migrate.load import Role
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.events import EventQueue
from tuning.simulator.instance import Instance
from tuning.simulator.prefix_reader import PrefixReader
from tuning.simulator.step_timing import StepTiming


class PromptInstance(Instance, ABC):
    """What `PrefillInstance` and `MonolithicInstance` share."""

    def __init__(
        self,
        number: int,
        role: Role,
        pool: DevicePool,
        link_bytes_per_s: float,
        timing: StepTiming,
        budget: int,
        *,
        reader: PrefixReader,
        events: EventQueue,
    ) -> None:
        super().__init__(number, role, pool, link_bytes_per_s, timing, budget)
        self._timing = timing
        self._budget = budget
        self._reader = reader
        self._events = events
        self._queue: deque[int] = deque()

    def enqueue(self, now_s: float, row: int) -> None:
        """A request was sent here."""
        self._queue.append(row)
        self.start_next(now_s)

    @abstractmethod
    def start_next(self, now_s: float) -> None:
        """A request has come, or room was made."""
