"""Which shard of the directory is to make room: the one whose next victim was used longest ago. Pure.

A store's tier is one room, but each shard orders only what it knows of it. Were shards drawn by the bytes that they
have there, one with much that is hot would lose as large a share of it as one with much that is never used again
(`python -m load_tests.shard_eviction` compares). So each shard tells, with every answer about room and once a second
beside, how long ago the first that would go was last used. What was told is at worst too old, since shards only get
younger as long as readers let go of nothing that is older: then the shard gives what it has longest, and tells anew.

With LFU, shards are still compared by time: within a shard the least frequently used goes, but which shard is next
says the last use of that.
"""

from __future__ import annotations

import math

from kv.tiers import TIERS, Tier


class RoomOrder:
    """One store's. Times are on the caller's clock."""

    def __init__(self, num_shards: int) -> None:
        self._oldest_s: dict[Tier, list[float]] = {tier: [-math.inf] * num_shards for tier in TIERS}
        """What would go next was used no earlier. Of a shard that was never heard of, that is to be found out."""

    def note(self, shard: int, tier: Tier, idle_s: float | None, now_s: float) -> None:
        """A shard says how long what would go next has not been used; None: nothing can go, so what can later is used
        from now on."""
        self._oldest_s[tier][shard] = now_s - (idle_s or 0.0)

    def put_last(self, shard: int, tier: Tier) -> None:
        """A shard does not answer. It is asked last until it is heard of again."""
        self._oldest_s[tier][shard] = math.inf

    def shards(self, tier: Tier) -> list[int]:
        """All of them, in the order in which they are to be asked."""
        oldest_s = self._oldest_s[tier]
        return sorted(range(len(oldest_s)), key=oldest_s.__getitem__)
