"""An instance that does both: prompts and decodes share its steps."""

from __future__ import annotations

from collections.abc import Callable

from tuning.simulator.decode_batch import DecodeBatch
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.events import COMPUTED, EventQueue
from tuning.simulator.instance import Instance
from tuning.simulator.prefix_reader import Begun, PrefixReader
from tuning.simulator.prompt_instance import PromptInstance
from tuning.simulator.prompts import Prompts
from tuning.simulator.step_timing import StepTiming


class MonolithicInstance(PromptInstance):
    """As the engine does: decodes first, and what is left of the budget for the prompt at the head of the queue. While
    there is a prompt to compute each step is an event; else decodes are moved on in closed form. One prompt is computed
    at a time (`PrefillInstance` says why); while its prefix is fetched, the others decode.

    Args:
        started: called with the row and this instance when it holds a request's blocks, prompt and answer.
        computed: as for `PrefillInstance`. It answers with how many tokens are still wanted.
    """

    def __init__(
        self,
        number: int,
        pool: DevicePool,
        link_bytes_per_s: float,
        timing: StepTiming,
        budget: int,
        *,
        batch: DecodeBatch,
        prompts: Prompts,
        reader: PrefixReader,
        events: EventQueue,
        started: Callable[[int, Instance], None],
        computed: Callable[[float, MonolithicInstance, Begun, float], int],
    ) -> None:
        super().__init__(number, "monolithic", pool, link_bytes_per_s, timing, budget, reader=reader, events=events)
        self.batch = batch
        self._prompts = prompts
        self._started = started
        self._computed = computed
        self._begun: Begun | None = None
        self._done_tokens = 0
        self._compute_s = 0.0
        self._chunk = 0
        """Prompt tokens in the step that runs."""
        self._decode_steps = 0
        """Steps that end with the next event; 0 where only time passes."""
        self._runs = False
        self._step_start_s = 0.0
        self._plan = 0

    def start_next(self, now_s: float) -> None:
        """A request has come, or room was made: begin with it, at the end of the step that runs."""
        if not self._runs:
            self._go_on(now_s)
        elif self._queue and self._begun is None and self._decode_steps:
            if self._step_start_s == now_s:
                self._go_on(now_s)
            elif self._decode_steps > 1:
                self._schedule_decodes(self.batch.steps_to(now_s), now_s)

    def _go_on(self, now_s: float) -> None:
        """At the end of a step: what the next one is."""
        batch = self.batch
        batch.now_s = now_s
        if self._begun is None and self._queue:
            row = self._queue[0]
            extra_blocks = self._prompts.lifetime_blocks[row] - self._prompts.num_blocks[row]
            self._begun = self._reader.begin(
                row, self.pool, self.link_in, now_s, extra_blocks, batch.size, batch.context_tokens
            )
            if self._begun is not None:
                self._queue.popleft()
                self._started(row, self)
                self._done_tokens = 0
                self._compute_s = 0.0
        begun = self._begun
        self._chunk = 0
        if begun is not None and begun.ready_s <= now_s:
            self._step_with_prompt(begun, now_s)
        elif batch.size:
            steps = batch.steps_to_leave() if begun is None else batch.steps_to(begun.ready_s)
            self._schedule_decodes(steps, now_s)
        elif begun is not None:
            self._schedule(0, begun.ready_s)
        else:
            self._runs = False

    def _step_with_prompt(self, begun: Begun, now_s: float) -> None:
        batch = self.batch
        self._chunk = min(begun.new_tokens - self._done_tokens, self._budget - batch.size)
        chunk = (self._chunk, begun.cached_tokens + self._done_tokens)
        step_s = self._timing.step_s((chunk,), batch.size, batch.context_tokens)
        self._schedule(1 if batch.size else 0, now_s + step_s)

    def _schedule_decodes(self, steps: int, now_s: float) -> None:
        self._schedule(steps, max(now_s, self.batch.end_s(steps)))

    def _schedule(self, decode_steps: int, end_s: float) -> None:
        self._runs = True
        self._decode_steps = decode_steps
        self._step_start_s = self.batch.now_s
        self._plan += 1
        self._events.schedule(end_s, COMPUTED, self._on_step_end, self._plan)

    def _on_step_end(self, now_s: float, plan: int) -> None:
        if plan != self._plan:
            return
        step_s = now_s - self._step_start_s
        decode_steps, self._decode_steps = (
            self._decode_steps,
            0,
        )  # nothing to cut short while the step's end is dealt with
        if self._chunk or decode_steps:
            self.busy_s += step_s
        if decode_steps:
            self.batch.advance(decode_steps, now_s)
        begun = self._begun
        if self._chunk and begun is not None:
            self._compute_s += step_s
            self._done_tokens += self._chunk
            if self._done_tokens == begun.new_tokens:
                self._begun = None
                self.rate.update(begun.new_tokens, self._compute_s)
                steps = self._computed(now_s, self, begun, self._compute_s)
                if steps:
                    self.batch.join(begun.row, self._prompts.input_tokens[begun.row] + 1, steps)
        self._go_on(now_s)
