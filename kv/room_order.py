"""Which shard of the directory is to make room: the one whose next victim was used longest ago. Pure.

A store's tier is one room, but each shard orders only what it knows of it. Were shards drawn by the bytes that they
have there, one with much that is hot would lose as large a share of it as one with much that is never used again
(`python -m load_tests.shard_eviction` compares). So each shard tells, with every answer about room and once a second
beside, how long ago the first that would go was last used. That time only moves on as long as nothing of the shard is
let go of by its readers, so what was told is at worst too old: then the shard gives what it has longest, and tells
anew.

With LFU, shards are still compared by time: within a shard the least frequently used goes, but which shard is next
says the last use of that.
"""

from __future__ import annotations

import math

from kv.tiers import TIERS, Tier


class RoomOrder:
    """One store's. Times are on the caller's clock."""

    def __init__(self, num_shards: int) -> None:
        self._last_uses_s: dict[Tier, list[float]] = {tier: [math.inf] * num_shards for tier in TIERS}

    def note(self, shard: int, tier: Tier, idle_s: float | None, now_s: float) -> None:
        """A shard says how long what would go next has not been used; None: nothing can go, or it does not answer."""
        self._last_uses_s[tier][shard] = math.inf if idle_s is None else now_s - idle_s

    def shards(self, tier: Tier) -> list[int]:
        """All of them, in the order in which they are to be asked; last those that had nothing."""
        last_uses_s = self._last_uses_s[tier]
        return sorted(range(len(last_uses_s)), key=last_uses_s.__getitem__)
