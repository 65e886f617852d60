"""How much of a prompt goes into one step where other workers run layers of it (design decision D4).

A host runs at most one stage of another's between two steps of its own, so its own tokens come farther apart by what a
stage takes. A decode's row takes next to nothing; a prompt's chunk is made so long that it takes about as long as a
step of the host's (ours), or as a setting says.
"""

from __future__ import annotations

from typing import Final

LEAST_TOKENS: Final = 64
"""A chunk has so many in any case: below, reading the weights is most of what it takes."""
_GRAIN: Final = 16
"""Tokens by which chunks differ: kernels compute so many rows at a time."""
_KEPT: Final = 0.8
"""What a stage weighs when the next one has been measured."""


def chunk_tokens(slice_s: float, token_s: float, budget: int) -> int:
    """Prompt tokens of a step whose hosted stage is to take `slice_s`, where one takes `token_s` for a token: at least
    `LEAST_TOKENS`, and at most `budget`, which is all that a step may have."""
    if slice_s >= token_s * budget:
        return budget
    return min(budget, max(LEAST_TOKENS, int(slice_s / token_s) // _GRAIN * _GRAIN))


class HostedSlice:
    """What the hosts of one instance take for its stages, as long as it lies as it does.

    Args:
        slice_s: what a stage is to take; None: as long as a step of the host's own.
    """

    def __init__(self, slice_s: float | None) -> None:
        self._slice_s = slice_s
        self._host_step_s = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def count(self, num_tokens: int, stage_s: float, host_step_s: float) -> None:
        """A step with `num_tokens` tokens, prompt chunks among them, has come back. `stage_s`: of the longest of its
        hosted stages; `host_step_s`: what a step of that host's own takes at present, 0 if it had none."""
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + stage_s
        self._host_step_s = host_step_s

    def most_tokens(self, budget: int) -> int:
        """Prompt tokens of the next step. All of `budget` before anything was measured, and for a host that has no
        steps of its own."""
        slice_s = self._host_step_s if self._slice_s is None else self._slice_s
        if slice_s == 0 or self._tokens == 0:
            return budget
        return chunk_tokens(slice_s, self._seconds / self._tokens, budget)
