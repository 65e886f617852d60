"""Prefill and decode on the same instances."""

from __future__ import annotations

import math

from tuning.simulator.events import STORED
from tuning.simulator.flow import Flow
from tuning.simulator.instance import Instance
from tuning.simulator.monolithic_instance import MonolithicInstance
from tuning.simulator.prefix_reader import Begun
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.step_timing import StepTiming
from tuning.trace.trace import Trace


class MonolithicFlow(Flow):
    """A prompt's KV stays where it was computed; what the store has not got of it is written there beside."""

    def __init__(self, trace: Trace, timing: StepTiming, settings: SimulationSettings) -> None:
        super().__init__(trace, timing, settings)
        self.instances = [
            MonolithicInstance(
                number,
                self.pool(),
                settings.link_bytes_per_s,
                timing,
                settings.max_batch_tokens,
                batch=self.batch(),
                prompts=self.prompts,
                reader=self.reader,
                events=self.events,
                started=self._on_started,
                computed=self._on_computed,
            )
            for number in range(settings.monolithic_instances)
        ]
        self.dispatching = self.dispatch_over(self.instances, self.instances)

    def answer_ended(self, now_s: float, row: int) -> None:
        """See `Flow`."""
        instance = self.instances[self.outcomes.decode_instance[row]]
        self.free_and_store_answer(now_s, instance, row)
        instance.start_next(now_s)

    def send(self, now_s: float, row: int, prefill: Instance, decode: Instance) -> None:
        """See `Flow`."""
        self.instances[prefill.number].enqueue(now_s, row)

    def _on_started(self, row: int, instance: Instance) -> None:
        self.dispatching.on_decode(row, instance)

    def _on_computed(self, now_s: float, instance: MonolithicInstance, begun: Begun, compute_s: float) -> int:
        row = begun.row
        self.note_first_token(now_s, instance, begun)
        if self.store.is_there:
            written_s = self.write_back(now_s, instance, begun, compute_s, 0)
            self.events.schedule(written_s, STORED, self._on_written, row)
        steps = self.prompts.output_tokens[row] - 1
        if not steps:
            self.free_and_store_answer(now_s, instance, row)
        return steps

    def _on_written(self, now_s: float, row: int) -> None:
        self.put(now_s, row)
        if not math.isnan(self.outcomes.end_s[row]):
            self.prompts.forget(row)
