"""Continuous batching: sequences that get one token a step, fast-forwarded between joins and leaves."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

from tuning.simulator.step_timing import StepTiming


class TokenGaps:
    """Times between tokens of one answer, gathered over all of them: `seconds[i]` was seen `counts[i]` times."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.counts = array("q")

    def add(self, seconds: float, count: int) -> None:
        """Take in `count` equal gaps."""
        self.seconds.append(seconds)
        self.counts.append(count)


class DecodeBatch:
    """The running sequences of one instance. All grow by a token a step; time stands at the end of a step.

    A stretch of steps between two changes of the batch is one sum in closed form, and its gaps between tokens count as
    equal: within it a step grows by no more than its own tokens' KV.

    Args:
        last_token_s: by row, when a sequence that joins got its token before.
        leave: called with the time and the row of each sequence that has all its tokens.
    """

    __slots__ = (
        "_end_step",
        "_gaps",
        "_last_token_s",
        "_leave",
        "_newcomers",
        "_timing",
        "busy_s",
        "context_tokens",
        "now_s",
        "size",
        "steps",
        "token_s",
    )

    def __init__(
        self,
        timing: StepTiming,
        gaps: TokenGaps,
        last_token_s: array[float],
        leave: Callable[[float, int], None],
    ) -> None:
        self.size = 0
        self.context_tokens = 0
        """That the next step attends to, its own tokens among them."""
        self.now_s = 0.0
        self.steps = 0
        self.busy_s = 0.0
        self.token_s = 0.0
        """Sequences times seconds."""
        self._timing = timing
        self._gaps = gaps
        self._last_token_s = last_token_s
        self._leave = leave
        self._end_step: list[tuple[int, int, int]] = []
        self._newcomers: list[int] = []

    def join(self, row: int, context_tokens: int, steps: int) -> None:
        """Add a sequence that wants `steps` (at least 1) tokens; its first step attends to `context_tokens`."""
        heappush(self._end_step, (self.steps + steps, row, context_tokens + steps))
        self.size += 1
        self.context_tokens += context_tokens
        self._newcomers.append(row)

    def steps_to_leave(self) -> int:
        """Until the next sequence has all its tokens."""
        return self._end_step[0][0] - self.steps

    def steps_to(self, time_s: float) -> int:
        """The fewest steps that end at `time_s` or later, or with which somebody leaves; at least 1."""
        elapsed_s = time_s - self.now_s
        steps = self._timing.steps_within(self.size, self.context_tokens, elapsed_s) if elapsed_s > 0 else 0
        if steps == 0 or self._timing.decode_steps_s(self.size, self.context_tokens, steps) < elapsed_s:
            steps += 1
        return min(steps, self.steps_to_leave())

    def end_s(self, steps: int) -> float:
        """When so many steps from now will have ended."""
        return self.now_s + self._timing.decode_steps_s(self.size, self.context_tokens, steps)

    def advance(self, steps: int, end_s: float) -> None:
        """`steps` steps have ended at `end_s`. Those with all their tokens leave."""
        size = self.size
        seconds = end_s - self.now_s
        newcomers = self._newcomers
        others_s, num_others = size * seconds, size * steps
        if newcomers:
            first_s = end_s
            if steps > 1:
                first_s = self.now_s + self._timing.decode_step_s(size, self.context_tokens)
            for row in newcomers:
                self._gaps.add(first_s - self._last_token_s[row], 1)
            others_s -= len(newcomers) * (first_s - self.now_s)
            num_others -= len(newcomers)
            newcomers.clear()
        if num_others:
            self._gaps.add(others_s / num_others, num_others)
        self.busy_s += seconds
        self.token_s += size * seconds
        self.now_s = end_s
        self.steps += steps
        self.context_tokens += size * steps
        end_step = self._end_step
        while end_step and end_step[0][0] == self.steps:
            _, row, context_tokens = heappop(end_step)
            self.size -= 1
            self.context_tokens -= context_tokens
            self._leave(end_s, row)
