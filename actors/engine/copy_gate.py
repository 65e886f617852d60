"""Copies of pages by other threads than the engine's, and times at which there are none.

Where lanes lie changes only while no such copy is under way (design decision D4): each one sees one placement, none
reads slabs of a lane that has left, and what one has written is there for the last copy of a move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class GateClosedError(Exception):
    """A copy was not begun, since the gate was not opened in time."""


class CopyGate:
    """One engine's. Safe to use from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_under_way = 0
        self._is_closed = False
        self._is_refusing = False
        self._when_idle: list[Callable[[], None]] = []

    @property
    def num_under_way(self) -> int:
        """Copies that have begun and not ended."""
        return self._num_under_way

    @contextmanager
    def copying(self, timeout_s: float) -> Iterator[None]:
        """One copy. Waits while the gate is closed; GateClosedError when that takes longer than `timeout_s`, or when
        nobody is to wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_refusing or not self._is_closed, timeout_s)
            if self._is_refusing:
                raise GateClosedError("all KV is being computed anew")
            if self._is_closed:
                raise GateClosedError(f"lanes were being moved for longer than {timeout_s:.1f} s")
            self._num_under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_under_way -= 1
            self._tell()

    def close(self) -> None:
        """No copy begins from now on until `open`. Does not wait."""
        with self._changed:
            self._is_closed = True

    def refuse(self) -> None:
        """Of a closed gate: copies that wait, and those that come before it is opened, are not begun. What they would
        read or fill is of no use any more."""
        with self._changed:
            self._is_refusing = self._is_closed
            self._changed.notify_all()

    def when_idle(self, call: Callable[[], None]) -> None:
        """`call` is called once, from any thread, in this call already if need be, as soon as no copy is under way."""
        with self._changed:
            self._when_idle.append(call)
        self._tell()

    def open(self) -> None:
        """Copies may begin again."""
        with self._changed:
            self._is_closed = self._is_refusing = False
            self._changed.notify_all()

    def _tell(self) -> None:
        with self._changed:
            if self._num_under_way:
                return
            told, self._when_idle = self._when_idle, []
        for call in told:
            call()
