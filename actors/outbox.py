"""Messages from a worker to ingress replicas: collected by owner, fetched by a waiting call (design decision D1).

An ingress keeps one `collect` call open. A step's tokens for it leave in one reply; while no call is open they gather,
so that a slow ingress gets fewer, larger messages and never a backlog of small ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable

from actors.engine.request import TokenEvent
from actors.messages import HandOver, WorkerMessage


class Outbox:
    """Used from one event loop. Owners that stopped asking are reported by `lost_owners`, and forgotten."""

    def __init__(self) -> None:
        self._messages: dict[str, WorkerMessage] = defaultdict(WorkerMessage)
        self._ready: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._last_seen_s: dict[str, float] = {}

    def deliver(self, events: Iterable[TokenEvent]) -> None:
        """Queues token events for their owners."""
        for event in events:
            self._touch(event.owner)
            self._messages[event.owner].events.append(event)
            self._ready[event.owner].set()

    def deliver_hand_over(self, owner: str, hand_over: HandOver) -> None:
        """Queues the word that a request's KV can be taken over."""
        self._touch(owner)
        self._messages[owner].hand_overs.append(hand_over)
        self._ready[owner].set()

    def nudge(self) -> None:
        """Answers every open call: the load has changed."""
        for owner in self._last_seen_s:
            self._ready[owner].set()

    async def collect(self, owner: str, timeout_s: float) -> WorkerMessage:
        """All that was queued for `owner`; waits for it up to `timeout_s`, then gives an empty message."""
        ready = self._ready[owner]
        self._last_seen_s[owner] = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), timeout_s)
        self._last_seen_s[owner] = time.monotonic()
        ready.clear()
        return self._messages.pop(owner, WorkerMessage())

    def lost_owners(self, silence_s: float) -> list[str]:
        """Owners that have not asked for so long: dead, or cut off. Their messages are dropped."""
        deadline_s = time.monotonic() - silence_s
        lost = [owner for owner, seen_s in self._last_seen_s.items() if seen_s < deadline_s]
        for owner in lost:
            del self._last_seen_s[owner]
            self._messages.pop(owner, None)
            self._ready.pop(owner, None)
        return lost

    def _touch(self, owner: str) -> None:
        self._last_seen_s.setdefault(owner, time.monotonic())
