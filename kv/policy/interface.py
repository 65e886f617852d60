"""What an eviction policy is: the order in which stored things should go, and what has outlived its time-to-live.

A policy knows things by integer handles that its caller gives out, and nothing else of them: not their bytes, nor who
holds them. The directory drives one policy for each store and tier; a simulator drives the same classes on simulated
time, millions of times, which is why calls take plain numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders handles for eviction. Not thread-safe.

    `now_s` is in seconds on any clock that starts anywhere, finite. A clock that steps back is no error: a `now_s`
    below the latest one seen, by whatever method, counts as that one. Among calls at the same time the later call is
    the more recent use.
    """

    def insert(self, handle: int, group: int, now_s: float) -> None:
        """Add an entry, as just used; its count of uses begins at 0.

        Args:
            group: 0 or more, as `kv.policy.groups.GroupTable` numbers them. Policies without groups pass over it.

        Raises:
            ValueError: `handle` is here already.
        """

    def use(self, handle: int, now_s: float) -> None:
        """Note a hit, or a put of a chain that the entry lies on.

        Of a chain used at once, call for the last entry first: of entries that are otherwise equal the one used longest
        ago goes first, and a suffix without its prefix can never be hit.

        Raises:
            KeyError: `handle` is not here.
        """

    def remove(self, handle: int) -> None:
        """Forget an entry.

        Raises:
            KeyError: `handle` is not here.
        """

    def victims(self, now_s: float) -> Iterator[int]:
        """Every handle, in the order in which they should go.

        Lazy: taking the first few does not look at all the others. The caller skips what is held and stops when it has
        enough; it changes the policy only when it is done with the iterator. Iterating changes nothing.
        """

    def expired(self, now_s: float, limit: int) -> list[int]:
        """Handles that were last used longer ago than their time-to-live, longest overdue first.

        They stay until `remove`, so the next call returns them again: a caller that may not remove some of them asks
        for as many more. The cost grows with `limit`, not with how many have expired.

        Args:
            limit: at most so many, 0 or more.
        """

    def __len__(self) -> int:
        """Entries that are here."""
