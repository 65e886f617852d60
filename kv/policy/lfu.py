"""Least frequently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class _Bucket:
    """The entries with one count of uses, by their last use, the oldest first; a link of a ring of rising counts."""

    __slots__ = ("after", "before", "handles", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.handles: OrderedDict[int, None] = OrderedDict()
        self.before = self
        self.after = self


class LfuPolicy:
    """An `EvictionPolicy`: what was used least often since its insertion goes first; nothing expires. Calls are O(1).

    Entries with equal counts go by their last use, the oldest first. Counts are exact and never fade, unlike those of
    Redis's `allkeys-lfu`, which are logarithmic and decay. The name is that of Redis and of SGLang
    (`--radix-eviction-policy lfu`, with the same rule for equal counts); buckets by count, linked in order, are from
    Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme" (arXiv 2110.11602).
    """

    def __init__(self) -> None:
        self._bucket_of: dict[int, _Bucket] = {}
        self._ends = _Bucket(-1)
        """Before the lowest count and after the highest; always empty."""

    def insert(self, handle: int, group: int, now_s: float) -> None:
        """See `EvictionPolicy`."""
        if handle in self._bucket_of:
            raise ValueError(f"handle {handle} is here already: remove it before inserting it again")
        self._add(handle, self._ends)

    def use(self, handle: int, now_s: float) -> None:
        """See `EvictionPolicy`."""
        bucket = self._bucket_of[handle]
        if len(bucket.handles) == 1 and bucket.after.uses != bucket.uses + 1:
            bucket.uses += 1  # alone, and nobody to join: what the hottest entries do at nearly every use
        else:
            self._add(handle, bucket)
            self._drop(handle, bucket)

    def remove(self, handle: int) -> None:
        """See `EvictionPolicy`."""
        self._drop(handle, self._bucket_of.pop(handle))

    def victims(self, now_s: float) -> Iterator[int]:
        """Every handle by its count of uses, the lowest first; equal counts by the last use, the oldest first."""
        bucket = self._ends.after
        while bucket is not self._ends:
            yield from bucket.handles
            bucket = bucket.after

    def expired(self, now_s: float, limit: int) -> list[int]:
        """None: there is no time-to-live here."""
        return []

    def __len__(self) -> int:
        return len(self._bucket_of)

    def _add(self, handle: int, before: _Bucket) -> None:
        """Put a handle into the bucket of one use more than `before` has."""
        bucket = before.after
        if bucket.uses != before.uses + 1:
            bucket = _Bucket(before.uses + 1)
            bucket.before, bucket.after = before, before.after
            bucket.before.after = bucket.after.before = bucket
        bucket.handles[handle] = None
        self._bucket_of[handle] = bucket

    def _drop(self, handle: int, bucket: _Bucket) -> None:
        """Take a handle out of a bucket, and the bucket out of the ring when it was the last."""
        del bucket.handles[handle]
        if not bucket.handles:
            bucket.before.after, bucket.after.before = bucket.after, bucket.before
