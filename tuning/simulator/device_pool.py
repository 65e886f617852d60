"""The KV pool of one instance: live blocks, cached ones that can be found again, and free ones."""

from __future__ import annotations

from collections.abc import Sequence

from kv.policy.lru import LruPolicy
from tuning.simulator.run_table import RunTable


class DevicePool(RunTable):
    """As the engine's block manager: `live + private + cached + free = capacity` after every call.

    Live blocks are prompts' blocks that requests hold, shared by all that have them. Private ones belong to one request
    and cannot be found: computed later, a partial last block, generated tokens. Cached ones are held by nobody and go
    least recently used first, a prompt's last block before its first.

    Args:
        keeps_prefixes: what is released can be found again.
    """

    def __init__(self, capacity_blocks: int, *, keeps_prefixes: bool = True) -> None:
        super().__init__()
        self.capacity_blocks = capacity_blocks
        self.live_blocks = 0
        self.private_blocks = 0
        self.cached_blocks = 0
        self.peak_held_blocks = 0
        self._keeps_prefixes = keeps_prefixes
        self._holders: dict[int, int] = {}
        self._cached = LruPolicy()

    @property
    def held_blocks(self) -> int:
        """Of requests."""
        return self.live_blocks + self.private_blocks

    @property
    def free_blocks(self) -> int:
        """That hold nothing."""
        return self.capacity_blocks - self.held_blocks - self.cached_blocks

    def match(self, chain: Sequence[int], stop: int) -> int:
        """How many of `chain[:stop]`, from the first on, are here."""
        return self.matched(chain, 0, stop) if self._keeps_prefixes else 0

    def take(self, chain: Sequence[int], matched: int, num_blocks: int) -> bool:
        """Hold the blocks `chain[:matched]`, which are here, and as many private ones as make `num_blocks` together.

        False when there is no room; then nothing has changed.
        """
        new_blocks = num_blocks - matched
        held_blocks = self.live_blocks + self.private_blocks + new_blocks
        if matched:
            # Counted before anything is cut: what is cached is to stay in its order where there is no room.
            for handle, count in self._spans(chain, matched):
                if not self._holders[handle]:
                    held_blocks += count
        if held_blocks > self.capacity_blocks:
            return False
        if matched:
            self._hold(self._runs_within(chain, matched))
        self.private_blocks += new_blocks
        shortage = held_blocks + self.cached_blocks - self.capacity_blocks
        if shortage > 0:
            self._evict(shortage)
        if held_blocks > self.peak_held_blocks:
            self.peak_held_blocks = held_blocks
        return True

    def keep(self, chain: Sequence[int], matched: int, stop: int) -> int:
        """The private blocks for `chain[matched:stop]` are computed and can be found from now on; their holder holds
        them like those before. Of a block that somebody else has computed meanwhile one copy is dropped.

        Returns:
            How many private blocks that were.
        """
        if not self._keeps_prefixes:
            return 0
        start = matched
        while start < stop:
            end = self.matched(chain, start, stop)
            if end > start:
                # From the first block on, as runs begin where a prompt's part of them does.
                self._hold(self._runs_within(chain, end)[len(self._runs_within(chain, start)) :])
            start = self.missing(chain, end, stop)
            if start > end:
                handle = self._add(chain[end:start])
                self._holders[handle] = 1
                self.live_blocks += start - end
        self.private_blocks -= stop - matched
        return stop - matched

    def release(self, chain: Sequence[int], held: int, num_private: int) -> None:
        """Let go of the blocks `chain[:held]` and of `num_private` private ones."""
        self.private_blocks -= num_private
        for handle in reversed(self._runs_within(chain, held) if held else []):
            self._holders[handle] -= 1
            if not self._holders[handle]:
                size = len(self._runs[handle])
                self.live_blocks -= size
                self.cached_blocks += size
                self._cached.insert(handle, 0, 0.0)

    def _hold(self, handles: Sequence[int]) -> None:
        for handle in handles:
            if not self._holders[handle]:
                size = len(self._runs[handle])
                self.cached_blocks -= size
                self.live_blocks += size
                self._cached.remove(handle)
            self._holders[handle] += 1

    def _evict(self, shortage: int) -> None:
        """Forget so many cached blocks; there are enough."""
        self.cached_blocks -= shortage
        gone = []
        for handle in self._cached.victims(0.0):
            size = len(self._runs[handle])
            if size > shortage:
                self._shorten(handle, shortage, from_front=False)
                break
            gone.append(handle)
            shortage -= size
            if not shortage:
                break
        for handle in gone:
            self._cached.remove(handle)
            self._drop(handle)
            del self._holders[handle]

    def _cut(self, handle: int, count: int) -> int:
        # The first blocks of a cached run go last, as they would have without the cut: they become the recent ones.
        head = super()._cut(handle, count)
        self._holders[head] = self._holders[handle]
        if not self._holders[handle]:
            self._cached.insert(head, 0, 0.0)
        return head
