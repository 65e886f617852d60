"""What a tier of the global store holds, block by block, under one of the store's eviction policies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from kv.policy.interface import EvictionPolicy
from tuning.simulator.run_table import RunTable

_EXPIRED_AT_A_TIME: Final = 64


class TierBlocks(RunTable):
    """One tier. Its policy orders runs of blocks (`RunTable`) by handle, as it orders extents in the live directory.

    A run that is cut is told to the policy as a new entry with as many uses as the old one. So LRU and TTL do what they
    would do with every block as an entry of its own. Room for consecutive new blocks is made before any of them is
    added, as the live store makes room for an extent: under LFU a put does not throw out what it has just brought.

    Args:
        capacity_blocks: it never holds more.
        policy: empty, and from now on driven by this object alone.
        group_of_block: group numbers by block id; None where there are no groups. An id below 0 is of group 0.
        counts_uses: the policy looks at how often an entry was used.
        front_first: of blocks used together the first goes first; else the last, as in the live store.
    """

    def __init__(
        self,
        capacity_blocks: int,
        policy: EvictionPolicy,
        *,
        group_of_block: Sequence[int] | None = None,
        counts_uses: bool = False,
        front_first: bool = False,
    ) -> None:
        super().__init__()
        self.capacity_blocks = capacity_blocks
        self.used_blocks = 0
        self.peak_blocks = 0
        self.inserted_blocks = 0
        self.evicted_blocks = 0
        self.expired_blocks = 0
        self._policy = policy
        self._group_of_block = group_of_block
        self._uses: dict[int, int] | None = {} if counts_uses else None
        self._front_first = front_first
        self._now_s = 0.0
        self._first_nameless = 0

    def use(self, chain: Sequence[int], stop: int, now_s: float) -> None:
        """Note a use of those of `chain[:stop]` that are here."""
        self._now_s = now_s
        self._use(self._runs_within(chain, stop))

    def put(self, chain: Sequence[int], stop: int, now_s: float) -> None:
        """Note a use of `chain[:stop]` and add what is not here, as far as the tier can hold it.

        As in the live directory, what is here stays while room is made for the rest, and then all of it counts as used,
        once. With `front_first` it is a plain cache instead, which takes one block after the other.
        """
        self._now_s = now_s
        if self._front_first:
            start = 0
            while start < stop:
                end = self.matched(chain, start, stop)
                self._use(self._runs_within(chain[start:end], end - start))
                start = self.missing(chain, end, stop)
                if start > end:
                    self._insert(chain[end:start], ())
            return
        start = self.matched(chain, 0, stop)
        held = self._runs_within(chain, stop)
        if start < stop:
            room = self.capacity_blocks - sum(len(self._runs[handle]) for handle in held)
            while start < stop and room > 0:
                end = self.missing(chain, start, stop)
                new = chain[start : min(end, start + room)]
                room -= len(new)
                held += self._insert(new, held)
                start = self.matched(chain, end, stop)
            # Ids rise along a prompt.
            held.sort(key=lambda handle: self._runs[handle][0])
        self._use(held)

    def put_missing(self, chain: Sequence[int], start: int, stop: int, now_s: float) -> int:
        """Add those of `chain[start:stop]` that are not here; how many. Nothing counts as used."""
        self._now_s = now_s
        inserted_before = self.inserted_blocks
        while start < stop:
            start = self.matched(chain, start, stop)
            end = self.missing(chain, start, stop)
            if end > start:
                self._insert(chain[start:end], ())
            start = end
        return self.inserted_blocks - inserted_before

    def put_nameless(self, num_blocks: int, now_s: float) -> None:
        """Add blocks that no prompt of the trace will ask for."""
        self._now_s = now_s
        stop = self._first_nameless
        self._first_nameless -= num_blocks
        self._insert(range(self._first_nameless, stop), ())

    def expire(self, now_s: float) -> None:
        """Forget what has outlived its time-to-live."""
        while handles := self._policy.expired(now_s, _EXPIRED_AT_A_TIME):
            for handle in handles:
                self.expired_blocks += self._remove(handle)

    def _use(self, handles: list[int]) -> None:
        """Tell the policy of a use of runs, given in the order of a prompt."""
        use = self._policy.use
        now_s = self._now_s
        uses = self._uses
        for handle in handles if self._front_first else reversed(handles):
            use(handle, now_s)
            if uses is not None:
                uses[handle] += 1

    def _insert(self, blocks: Sequence[int], held: Collection[int]) -> list[int]:
        """Add blocks that are not here, as many as the tier can hold; handles of their runs. `held` runs stay."""
        if self.capacity_blocks == 0:
            return []
        if len(blocks) > self.capacity_blocks:
            # As if they came one by one: those that are added last stay.
            blocks = blocks[-self.capacity_blocks :] if self._front_first else blocks[: self.capacity_blocks]
        shortage = self.used_blocks + len(blocks) - self.capacity_blocks
        if shortage > 0:
            self._make_room(shortage, held)
        handles = []
        for piece in self._by_group(blocks):
            handle = self._add(piece)
            self._enter(handle, piece[0])
            handles.append(handle)
        self.used_blocks += len(blocks)
        self.inserted_blocks += len(blocks)
        if self.used_blocks > self.peak_blocks:
            self.peak_blocks = self.used_blocks
        return handles

    def _by_group(self, blocks: Sequence[int]) -> list[Sequence[int]]:
        """The stretches of a prompt that are of one group each. Groups lie in one another along it."""
        groups = self._group_of_block
        if groups is None or blocks[0] < 0 or groups[blocks[0]] == groups[blocks[-1]]:
            return [blocks]
        cuts = [i for i in range(1, len(blocks)) if groups[blocks[i]] != groups[blocks[i - 1]]]
        return [blocks[i:j] for i, j in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]

    def _make_room(self, shortage: int, held: Collection[int]) -> None:
        self.evicted_blocks += shortage
        self.used_blocks -= shortage
        gone = []
        for handle in self._policy.victims(self._now_s):
            if handle in held:
                continue
            size = len(self._runs[handle])
            if size > shortage:
                self._shorten(handle, shortage, self._front_first)
                break
            gone.append(handle)
            shortage -= size
            if shortage == 0:
                break
        for handle in gone:
            self._drop(handle)
            self._forget(handle)

    def _remove(self, handle: int) -> int:
        num_blocks = self._drop(handle)
        self._forget(handle)
        self.used_blocks -= num_blocks
        return num_blocks

    def _enter(self, handle: int, first_block: int) -> None:
        groups = self._group_of_block
        self._policy.insert(handle, 0 if groups is None or first_block < 0 else groups[first_block], self._now_s)
        if self._uses is not None:
            self._uses[handle] = 0

    def _forget(self, handle: int) -> None:
        self._policy.remove(handle)
        if self._uses is not None:
            del self._uses[handle]

    def _cut(self, handle: int, count: int) -> int:
        first_block = self._runs[handle][0]
        head = super()._cut(handle, count)
        self._enter(head, first_block)
        if self._uses is not None:
            for _ in range(self._uses[handle]):
                self._policy.use(head, self._now_s)
            self._uses[head] = self._uses[handle]
        return head
