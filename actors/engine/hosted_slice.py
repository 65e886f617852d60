"""How much of a prompt goes into one step where other workers run layers of it (design decision D4).

A host's own tokens come farther apart by what a stage of another's takes that it runs in between. A decode's row takes
next to nothing; a prompt's chunk does. So chunks are made so short that a stage takes about as long as a step of the
host's, but no shorter than pays: below some size products run slower, and each token then costs both workers more than
the host's tokens gain (ours). Where that is depends on model, kernels and machine, so it is measured. Who wants a
latency in any case says so in a setting, which is kept whatever it costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from statistics import median
from typing import Final

LEAST_TOKENS: Final = 64
"""A chunk has so many in any case: below, reading the weights is most of what it takes."""
MOST_COST: Final = 1.15
"""What a token of a chunk may take, over the least that one took in a chunk of any size."""
TRIES: Final = 6
"""Stages of a size after which it is judged."""
_REMEMBERED: Final = 16
"""Stages of a size of which the median counts: one that waited for its core says nothing."""
_FILLED: Final = 0.75
"""Part of a size that a chunk has at least to count for it. A shorter one counts for a smaller size."""
_GRAIN: Final = 16
"""Tokens by which chunks of a set latency differ: kernels compute so many rows at a time."""
_KEPT: Final = 0.8
"""What a stage weighs in the mean over all sizes when the next one has been measured."""


def chunk_tokens(slice_s: float, token_s: float, budget: int) -> int:
    """Prompt tokens of a step whose hosted stage is to take `slice_s`, where one takes `token_s` for a token: at least
    `LEAST_TOKENS`, and at most `budget`, which is all that a step may have."""
    if slice_s >= token_s * budget:
        return budget
    return min(budget, max(LEAST_TOKENS, int(slice_s / token_s) // _GRAIN * _GRAIN))


class HostedSlice:
    """What the hosts of one instance take for its stages, as long as it lies as it does.

    Args:
        slice_s: what a stage is to take; None: as long as a step of the host's own, as far as that pays.
        budget: tokens that a step may have.
    """

    def __init__(self, slice_s: float | None, budget: int) -> None:
        self._slice_s = slice_s
        self._budget = budget
        self._host_step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._token_s: dict[int, deque[float]] = {size: deque(maxlen=_REMEMBERED) for size in _sizes(budget)}
        """By size of a chunk, in falling order: seconds for a token."""

    def count(self, num_tokens: int, stage_s: float, host_step_s: float) -> None:
        """A step with `num_tokens` tokens, prompt chunks among them, has come back. `stage_s`: of the longest of its
        hosted stages; `host_step_s`: what a step of that host's own takes at present, 0 if it had none."""
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + stage_s
        self._host_step_s = host_step_s
        size = next((size for size in self._token_s if num_tokens >= _FILLED * size), None)
        if size is not None:
            self._token_s[size].append(stage_s / num_tokens)

    def most_tokens(self) -> int:
        """Prompt tokens of the next step. The whole budget before anything was measured, and for a host that has no
        steps of its own."""
        if self._tokens == 0:
            return self._budget
        if self._slice_s is not None:
            return chunk_tokens(self._slice_s, self._seconds / self._tokens, self._budget)
        return self._budget if self._host_step_s == 0 else self._as_the_host_does()

    def _as_the_host_does(self) -> int:
        """The largest size whose stage takes no longer than a step of the host's, or the smallest that pays. What one
        costs is known only where it was run, so sizes are tried from the largest on; and one that prompts do not fill
        is not waited for."""
        token_s = {size: median(seen) for size, seen in self._token_s.items() if len(seen) >= TRIES}
        most_s = MOST_COST * min(token_s.values(), default=0.0)
        chosen, stage_s = self._budget, 0.0
        for size in self._token_s:
            if size not in token_s:
                if stage_s:
                    return size
                continue
            if stage_s and token_s[size] > most_s:
                return chosen
            chosen, stage_s = size if stage_s else self._budget, token_s[size] * size
            if stage_s <= self._host_step_s:
                return chosen
        return chosen


def _sizes(budget: int) -> Iterator[int]:
    """The budget, and halves of it, down to the least."""
    size = budget
    while size >= LEAST_TOKENS or size == budget:
        yield size
        size //= 2
