"""An instance that prefills: one prompt after the other, in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable

from tuning.simulator.device_pool import DevicePool
from tuning.simulator.events import COMPUTED, EventQueue
from tuning.simulator.prefix_reader import Begun, PrefixReader
from tuning.simulator.prompt_instance import PromptInstance
from tuning.simulator.step_timing import StepTiming


class PrefillInstance(PromptInstance):
    """Chunked prefill, approximated: prompts don't share steps. A prompt takes as many steps of `budget` tokens as it
    needs, one after the other, and the next begins when it is computed. In the engine short prompts would share steps;
    where computing is what a step's time goes for, as it is from some hundred tokens on, that ends no sooner (ours).

    Args:
        computed: called with the time, this instance, and what was begun, when the first token is there. Its blocks are
            held until `release`.
    """

    def __init__(
        self,
        number: int,
        pool: DevicePool,
        link_bytes_per_s: float,
        timing: StepTiming,
        budget: int,
        *,
        reader: PrefixReader,
        events: EventQueue,
        computed: Callable[[float, PrefillInstance, Begun, float], None],
    ) -> None:
        super().__init__(number, "prefill", pool, link_bytes_per_s, timing, budget, reader=reader, events=events)
        self._computed = computed
        self._current: tuple[Begun, float] | None = None

    def start_next(self, now_s: float) -> None:
        """Begin the next prompt if nothing is computed and there is room for its blocks."""
        if self._current is not None or not self._queue:
            return
        begun = self._reader.begin(self._queue[0], self.pool, self.link_in, now_s, 0, 0, 0)
        if begun is None:
            return
        self._queue.popleft()
        compute_s = self._compute_s(begun)
        self.busy_s += compute_s
        self._current = begun, compute_s
        self._events.schedule(begun.ready_s + compute_s, COMPUTED, self._on_computed, begun.row)

    def _compute_s(self, begun: Begun) -> float:
        step_s, budget = self._timing.step_s, self._budget
        cached, left = begun.cached_tokens, begun.new_tokens
        compute_s = 0.0
        while left > 0:
            chunk = min(left, budget)
            compute_s += step_s(((chunk, cached),), 0, 0)
            cached += chunk
            left -= chunk
        return compute_s

    def _on_computed(self, now_s: float, row: int) -> None:
        if self._current is None:
            raise RuntimeError(f"nothing was being computed for request {row}")
        begun, compute_s = self._current
        self._current = None
        self.rate.update(begun.new_tokens, compute_s)
        self._computed(now_s, self, begun, compute_s)
        self.start_next(now_s)
