"""What becomes of each request, written down while it happens."""

from __future__ import annotations

import math
from array import array


class Outcomes:
    """Columns by row of the trace. Times are NaN, and instances -1, until they are known."""

    def __init__(self, num_requests: int) -> None:
        def times() -> array[float]:
            return array("d", [math.nan]) * num_requests

        def counts(initial: int) -> array[int]:
            return array("q", [initial]) * num_requests

        self.admitted_s = times()
        self.prefill_start_s = times()
        self.first_token_s = times()
        self.end_s = times()
        self.hit_tokens_device = counts(0)
        self.hit_tokens_dram = counts(0)
        self.hit_tokens_disk = counts(0)
        self.hit_blocks = counts(0)
        self.computed_tokens = counts(0)
        self.prefill_instance = counts(-1)
        self.decode_instance = counts(-1)
        self.in_system = 0
        self.request_s = 0.0
        """Requests in the system, integrated over time as it passes."""
        self._changed_s = 0.0

    def enter(self, now_s: float) -> None:
        """A request has come."""
        self._pass(now_s)
        self.in_system += 1

    def leave(self, now_s: float) -> None:
        """A request has ended."""
        self._pass(now_s)
        self.in_system -= 1

    def _pass(self, now_s: float) -> None:
        self.request_s += self.in_system * (now_s - self._changed_s)
        self._changed_s = now_s
