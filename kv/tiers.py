"""The tiers of a node's store, and what the directory knows of one: which extents, how many bytes, who goes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from kv.policy.interface import EvictionPolicy

Tier: TypeAlias = Literal["dram", "disk"]
"""dram: the node's object store. disk: files on the node."""

TIERS: tuple[Tier, ...] = ("dram", "disk")
"""Fastest first: a block is read from the first tier that has it."""


class Entry(Protocol):
    """What a tier holds: `handle` names it to the policy."""

    handle: int
    group: int
    holds: int


class TierContents:
    """One tier of one store. Bytes are what the tier says an entry takes there.

    Args:
        policy: empty.
        entries: at least those that are here, by their handles.
    """

    def __init__(self, policy: EvictionPolicy, entries: Mapping[int, Entry]) -> None:
        self.num_bytes = 0
        self._policy = policy
        self._entries = entries
        self._sizes_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sizes_bytes)

    def add(self, entry: Entry, num_bytes: int, now_s: float) -> None:
        """Takes in an entry that is not here."""
        self._sizes_bytes[entry.handle] = num_bytes
        self.num_bytes += num_bytes
        self._policy.insert(entry.handle, entry.group, now_s)

    def use(self, handle: int, now_s: float) -> None:
        """Notes that an entry that is here was read, or put once more."""
        self._policy.use(handle, now_s)

    def regroup(self, handle: int, now_s: float) -> None:
        """The group of an entry that is here has changed. It counts as used."""
        self._policy.remove(handle)
        self._policy.insert(handle, self._entries[handle].group, now_s)

    def remove(self, handle: int) -> None:
        """Lets go of an entry that is here."""
        self.num_bytes -= self._sizes_bytes.pop(handle)
        self._policy.remove(handle)

    def handles(self, now_s: float) -> list[int]:
        """All that is here, in the order in which it should go."""
        return list(self._policy.victims(now_s))

    def victims(self, need_bytes: int, now_s: float) -> list[int] | None:
        """The first to go that nobody holds, until `need_bytes` are free; None when they are not enough."""
        chosen: list[int] = []
        freed = 0
        if need_bytes > 0:
            for handle in self._policy.victims(now_s):
                if self._entries[handle].holds == 0:
                    chosen.append(handle)
                    freed += self._sizes_bytes[handle]
                    if freed >= need_bytes:
                        break
        return chosen if freed >= need_bytes else None

    def first_free(self, now_s: float) -> int | None:
        """The first to go that nobody holds."""
        return next((handle for handle in self._policy.victims(now_s) if self._entries[handle].holds == 0), None)

    def free_bytes(self) -> int:
        """Bytes of all that nobody holds."""
        return sum(size for handle, size in self._sizes_bytes.items() if self._entries[handle].holds == 0)

    def expired(self, now_s: float, limit: int) -> list[int]:
        """Up to `limit` entries that have outlived their time-to-live and that nobody holds."""
        asked = limit
        while True:
            overdue = self._policy.expired(now_s, asked)
            free = [handle for handle in overdue if self._entries[handle].holds == 0]
            if len(free) >= limit or len(overdue) < asked:
                return free[:limit]
            asked *= 2

    def replace_policy(self, policy: EvictionPolicy, now_s: float) -> None:
        """Goes on under another policy, an empty one. It is told of the entries in the order in which they would have
        gone; when each was used is not known to it."""
        for handle in self.handles(now_s):
            policy.insert(handle, self._entries[handle].group, now_s)
        self._policy = policy
