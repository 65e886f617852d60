"""Messages from a worker to ingress replicas: collected by owner, fetched by a waiting call (design decision D1).

An ingress keeps one `collect` call open. A step's tokens for it leave in one reply; while no call is open they gather,
so that a slow ingress gets fewer, larger messages and never a backlog of small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from actors.engine.request import TokenEvent
from actors.messages import HandOver, WorkerMessage


@dataclass(slots=True)
class _Line:
    """What is kept for one owner."""

    session: int
    message: WorkerMessage = field(default_factory=WorkerMessage)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    open_calls: int = 0
    silent_periods: int = 0


class Outbox:
    """Used from one event loop.

    Owners that stopped asking are reported by `lost_owners`, and forgotten. One that asks again after that (it was
    stopped, not dead) is served in a new session, by whose number it sees that what it had here is gone.
    """

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._sessions = itertools.count(1)

    def expect(self, owner: str) -> None:
        """Watches an owner from now on, though it may never ask: it sent a request."""
        self._line(owner)

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Queues token events for their owners."""
        for event in events:
            line = self._line(event.owner)
            line.message.events.append(event)
            line.ready.set()

    def deliver_hand_over(self, owner: str, hand_over: HandOver) -> None:
        """Queues the word that a request's KV can be taken over."""
        line = self._line(owner)
        line.message.hand_overs.append(hand_over)
        line.ready.set()

    def nudge(self) -> None:
        """Answers every open call: the load has changed."""
        for line in self._lines.values():
            line.ready.set()

    async def collect(self, owner: str, timeout_s: float) -> WorkerMessage:
        """All that was queued for `owner`; waits for it up to `timeout_s`, then gives an empty message. An owner has at
        most one call open."""
        line = self._line(owner)
        line.open_calls += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(line.ready.wait(), timeout_s)
        finally:
            line.open_calls -= 1
            line.silent_periods = 0
        line.ready.clear()
        message, line.message = line.message, WorkerMessage()
        message.session = line.session
        return message

    def lost_owners(self, periods: int) -> list[str]:
        """To be called once a period: the owners that have had no call open for so many of them are dead, or cut off.
        Their messages are dropped.

        Periods are counted rather than seconds: while this whole process was stopped nobody could ask.
        """
        for line in self._lines.values():
            line.silent_periods = 0 if line.open_calls else line.silent_periods + 1
        lost = [owner for owner, line in self._lines.items() if line.silent_periods > periods]
        for owner in lost:
            del self._lines[owner]
        return lost

    def _line(self, owner: str) -> _Line:
        line = self._lines.get(owner)
        if line is None:
            line = self._lines[owner] = _Line(next(self._sessions))
            line.ready.set()  # its first call is answered at once: who asks knows nothing of this worker's load yet
        return line
