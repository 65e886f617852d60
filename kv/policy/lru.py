"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LruPolicy:
    """An `EvictionPolicy`: what was used longest ago goes first; nothing expires. Every call is O(1).

    The classic rule, exact over all entries (Redis's `allkeys-lru` samples); named as in Redis (`allkeys-lru`) and
    SGLang (`--radix-eviction-policy lru`), and what vLLM's prefix cache does.
    """

    def __init__(self) -> None:
        # Not a plain dict: finding its first key passes over everything that was deleted before it.
        self._handles: OrderedDict[int, None] = OrderedDict()

    def insert(self, handle: int, group: int, now_s: float) -> None:
        """See `EvictionPolicy`."""
        if handle in self._handles:
            raise ValueError(f"handle {handle} is here already: remove it before inserting it again")
        self._handles[handle] = None

    def use(self, handle: int, now_s: float) -> None:
        """See `EvictionPolicy`."""
        self._handles.move_to_end(handle)

    def remove(self, handle: int) -> None:
        """See `EvictionPolicy`."""
        del self._handles[handle]

    def victims(self, now_s: float) -> Iterator[int]:
        """Every handle by its last use, the oldest first."""
        return iter(self._handles)

    def expired(self, now_s: float, limit: int) -> list[int]:
        """None: there is no time-to-live here."""
        return []

    def __len__(self) -> int:
        return len(self._handles)
