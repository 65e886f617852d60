"""Who goes first among those that wait: first come, first served, with priorities that wear off.

A request of priority p counts as having come p steps later than it did, and earlier where p is below 0; the line is in
the order of these moments (ours; strict priorities, as vLLM has them, can keep a request waiting for ever). So

- those of equal priority go in the order in which they came;
- of two that came less than a step apart, the one with the smaller number goes first, whichever came first;
- whoever waits is overtaken only by those with a smaller number, q, that come within (p - q) steps after it. As numbers
  have bounds, nothing starves;
- a place in the line is known from the beginning: it depends neither on when anybody looks nor on who else is there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")


class Turn(NamedTuple):
    """A place in a line; the smaller one goes first."""

    at_s: float
    """When it counts as having come."""
    arrival: int = 0
    """Counts those that come, in their order; unlike for each in a line. Decides between equal moments."""


class WaitingLine(Generic[ItemT]):
    """Items by their turns, each with an id. To look at the first takes O(1); to come and to go, a search by halves."""

    def __init__(self) -> None:
        self._order: list[tuple[Turn, str]] = []
        self._waiting: dict[str, tuple[Turn, ItemT]] = {}

    def add(self, item_id: str, item: ItemT, turn: Turn) -> None:
        """Raises ValueError when an item of that id waits already."""
        if item_id in self._waiting:
            raise ValueError(f"{item_id!r} waits already; an id is used once")
        self._waiting[item_id] = (turn, item)
        insort(self._order, (turn, item_id))

    def remove(self, item_id: str) -> ItemT | None:
        """Takes an item out, wherever it is. None: it does not wait."""
        if item_id not in self._waiting:
            return None
        turn, item = self._waiting.pop(item_id)
        del self._order[bisect_left(self._order, (turn, item_id))]
        return item

    def first(self) -> ItemT | None:
        """Whose turn is next; it stays where it is. None: nobody waits."""
        return self._waiting[self._order[0][1]][1] if self._order else None

    def num_before(self, at_s: float) -> int:
        """How many go before somebody who comes now and counts as having come at `at_s`."""
        return bisect_right(self._order, at_s, key=lambda entry: entry[0].at_s)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item_id: object) -> bool:
        return item_id in self._waiting

    def __iter__(self) -> Iterator[ItemT]:
        """In the order of the line."""
        return (self._waiting[item_id][1] for _, item_id in self._order)
