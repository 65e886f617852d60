"""An instance that decodes: a running batch, moved on from event to event."""

from __future__ import annotations

from migrate.load import Role
from tuning.simulator.decode_batch import DecodeBatch
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.events import COMPUTED, EventQueue
from tuning.simulator.instance import Instance
from tuning.simulator.step_timing import StepTiming


class DecodeInstance(Instance):
    """Sequences join at the end of the step that runs when they come, and leave with their last token."""

    def __init__(
        self,
        number: int,
        pool: DevicePool,
        link_bytes_per_s: float,
        timing: StepTiming,
        budget: int,
        *,
        batch: DecodeBatch,
        events: EventQueue,
    ) -> None:
        role: Role = "decode"
        super().__init__(number, role, pool, link_bytes_per_s, timing, budget)
        self.batch = batch
        self._events = events
        self._joining: list[tuple[int, int, int]] = []
        self._planned_steps = 0
        self._plan = 0
        """Number of the latest one; events of earlier ones are void."""

    def join(self, now_s: float, row: int, context_tokens: int, steps: int) -> None:
        """A request's KV is here; it wants `steps` tokens, the first of them over `context_tokens`."""
        self._joining.append((row, context_tokens, steps))
        if not self.batch.size:
            self.batch.now_s = now_s
        if self.batch.now_s == now_s:
            self._start(now_s)
        elif len(self._joining) == 1:
            self._schedule(self.batch.steps_to(now_s), now_s)

    def _start(self, now_s: float) -> None:
        """At the end of a step: let in who waits, and go on."""
        for row, context_tokens, steps in self._joining:
            self.batch.join(row, context_tokens, steps)
        self._joining.clear()
        if self.batch.size:
            self._schedule(self.batch.steps_to_leave(), now_s)

    def _schedule(self, steps: int, now_s: float) -> None:
        self._plan += 1
        self._planned_steps = steps
        self._events.schedule(max(now_s, self.batch.end_s(steps)), COMPUTED, self._on_step_end, self._plan)

    def _on_step_end(self, now_s: float, plan: int) -> None:
        if plan != self._plan:
            return
        self.batch.advance(self._planned_steps, now_s)
        self.busy_s = self.batch.busy_s
        self._start(now_s)
