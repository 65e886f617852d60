"""Simulated time: what happens next, and what goes first when two things happen at once."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

Action = Callable[[float, int], None]
"""Called with the time and with the number it was scheduled with."""

STORED: Final = 0
COMPUTED: Final = 1
JOINED: Final = 2


class EventQueue:
    """Events by time. At equal times what ends goes before what begins: transfers into the store (`STORED`), then steps
    (`COMPUTED`), then arrivals at a decode instance (`JOINED`), then arrivals from outside, in the order of the trace;
    equals go in the order in which they were scheduled (ours).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Action, int]] = []
        self._scheduled = 0

    def schedule(self, time_s: float, rank: int, action: Action, number: int) -> None:
        """Let `action(time_s, number)` happen at a time that has not passed."""
        self._scheduled += 1
        heappush(self._heap, (time_s, rank, self._scheduled, action, number))

    def run(self, arrivals_s: list[float], arrive: Action) -> int:
        """Let everything happen, `arrive(time_s, row)` for each arrival among it; how many events that were."""
        heap = self._heap
        for row, arrival_s in enumerate(arrivals_s):
            while heap and heap[0][0] <= arrival_s:
                time_s, _, _, action, number = heappop(heap)
                action(time_s, number)
            arrive(arrival_s, row)
        while heap:
            time_s, _, _, action, number = heappop(heap)
            action(time_s, number)
        return self._scheduled + len(arrivals_s)
