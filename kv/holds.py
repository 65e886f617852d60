"""Holds on extents, leases and puts, with their deadlines. Plain bookkeeping; time comes in as `now_s`."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

_SWEEP_LIMIT = 256
"""Holds looked at in one sweep, so that many that expire together do not stall one call."""


class Holdable(Protocol):
    """What can be held: it counts its holds."""

    holds: int


@dataclass(slots=True)
class Hold:
    """A lease: nothing in `held` may go before it ends."""

    expires_s: float
    held: tuple[Holdable, ...]


@dataclass(slots=True)
class Put(Hold):
    """A put also announces blocks: nobody else brings those in `missing` while it lasts."""

    chain: tuple[bytes, ...]
    missing: frozenset[bytes]


class HoldTable:
    """See the module.

    Args:
        first_id: holds are numbered from here.
        on_expiry: told of every hold that ends by its deadline.
    """

    def __init__(self, first_id: int, on_expiry: Callable[[Hold], None]) -> None:
        self._ids = itertools.count(first_id)
        self._on_expiry = on_expiry
        self._holds: dict[int, Hold] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._pending: set[bytes] = set()
        self.num_puts = 0

    def __len__(self) -> int:
        """Holds that have not ended; expired ones count until they are swept."""
        return len(self._holds)

    def add(self, hold: Hold) -> int:
        """Returns the id to end it with."""
        hold_id = next(self._ids)
        self._holds[hold_id] = hold
        heapq.heappush(self._deadlines, (hold.expires_s, hold_id))
        for item in hold.held:
            item.holds += 1
        if isinstance(hold, Put):
            self.num_puts += 1
            self._pending.update(hold.missing)
        return hold_id

    def lease(self, lease_id: int) -> Hold | None:
        """A lease that has not ended, or None."""
        hold = self._holds.get(lease_id)
        return None if isinstance(hold, Put) else hold

    def put(self, put_id: int) -> Put | None:
        """A put that has not ended, or None."""
        hold = self._holds.get(put_id)
        return hold if isinstance(hold, Put) else None

    def end(self, hold_id: int) -> None:
        """Ends a hold that has not ended yet."""
        hold = self._holds.pop(hold_id)
        for item in hold.held:
            item.holds -= 1
        if isinstance(hold, Put):
            self.num_puts -= 1
            self._pending -= hold.missing

    def is_pending(self, key: bytes) -> bool:
        """Whether a put has announced the block."""
        return key in self._pending

    def any_pending(self, keys: Iterable[bytes]) -> bool:
        """Whether a put has announced any of the blocks."""
        return any(key in self._pending for key in keys)

    def sweep(self, now_s: float) -> bool:
        """Ends some of the holds that have expired.

        Returns:
            Whether there was anything to do; False means that none is left that has expired.
        """
        for looked_at in range(_SWEEP_LIMIT):
            if not self._deadlines or self._deadlines[0][0] > now_s:
                return looked_at > 0
            hold_id = heapq.heappop(self._deadlines)[1]
            hold = self._holds.get(hold_id)
            if hold is None:
                continue
            if hold.expires_s > now_s:  # renewed
                heapq.heappush(self._deadlines, (hold.expires_s, hold_id))
                continue
            self.end(hold_id)
            self._on_expiry(hold)
        return True
