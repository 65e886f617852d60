"""Which blocks are somewhere, in runs: consecutive blocks of one prompt that were last used together.

A table gives the answers that one entry for each block would give, at the price of one entry for each run: a run from
which only the first blocks are used is cut in two, and a run may lose blocks at either end (ours).

Everything rests on what an id of a trace stands for: a whole prefix. So a prompt that has a block has all blocks before
it, and the blocks of a run that a prompt has are the first ones of it: whoever walks along a prompt from its first
block on comes to every run at the run's first block. And ids rise along a prompt, since a prefix appears before what
continues it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise


def compact(blocks: Sequence[int]) -> Sequence[int]:
    """The same ids, as a `range` where they are consecutive: most are, and it takes no memory for each."""
    first = blocks[0]
    if blocks[-1] - first == len(blocks) - 1:
        return range(first, first + len(blocks))
    return blocks


def without(chain: Sequence[int], start: int, stop: int, busy: Set[int]) -> list[tuple[int, int]]:
    """The stretches (start, stop) of `chain[start:stop]` that have no block of `busy` in them."""
    if start == stop:
        return []
    if not busy or busy.isdisjoint(chain[start:stop]):
        return [(start, stop)]
    marks = [start - 1, *(index for index in range(start, stop) if chain[index] in busy), stop]
    return [(before + 1, after) for before, after in pairwise(marks) if after > before + 1]


class RunTable:
    """Runs by handle. Ids below 0 are blocks that no prompt asks for: they take room and are never found.

    A `chain` is a prompt's blocks from its first one on.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Sequence[int]] = {}
        self._run_at: dict[int, int] = {}
        """By a run's first block."""
        self._next_handle = 0

    def matched(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Where the blocks `chain[start:stop]` that follow each other here end; `start` where the first is missing."""
        run_at = self._run_at.get
        runs = self._runs
        index = 0
        while index < stop:
            handle = run_at(chain[index])
            if handle is None:
                if index >= start:
                    return index
                index = self.missing(chain, index, start)
                continue
            blocks = runs[handle]
            end = index + len(blocks)
            if end > stop or chain[end - 1] != blocks[-1]:
                end = _common_end(chain, index, stop, blocks)
            index = end
        return index

    def missing(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Where the blocks `chain[start:stop]` that are not here and follow each other end.

        `chain[start]`, or the block before it, is not here.
        """
        run_at = self._run_at
        if run_at.keys().isdisjoint(chain[start:stop]):
            return stop
        while chain[start] not in run_at:
            start += 1
        return start

    def _spans(self, chain: Sequence[int], stop: int) -> list[tuple[int, int]]:
        """The runs that have blocks of `chain[:stop]`: handle, and how many of its blocks that are."""
        run_at = self._run_at.get
        runs = self._runs
        spans = []
        index = 0
        while index < stop:
            handle = run_at(chain[index])
            if handle is None:
                index = self.missing(chain, index, stop)
                continue
            blocks = runs[handle]
            end = index + len(blocks)
            if end > stop or chain[end - 1] != blocks[-1]:
                end = _common_end(chain, index, stop, blocks)
            spans.append((handle, end - index))
            index = end
        return spans

    def _runs_within(self, chain: Sequence[int], stop: int) -> list[int]:
        """Handles of the runs that hold `chain[:stop]`, in this order; one that sticks out is cut first."""
        runs = self._runs
        return [
            handle if len(runs[handle]) == count else self._cut(handle, count)
            for handle, count in self._spans(chain, stop)
        ]

    def _add(self, blocks: Sequence[int]) -> int:
        """A new run of blocks that are not here; its handle."""
        handle = self._next_handle
        self._next_handle += 1
        self._runs[handle] = compact(blocks)
        if blocks[0] >= 0:
            self._run_at[blocks[0]] = handle
        return handle

    def _cut(self, handle: int, count: int) -> int:
        """Make the first `count` blocks of a run a run of their own; its handle. The others keep theirs."""
        blocks = self._runs[handle]
        self._runs[handle] = compact(blocks[count:])
        self._run_at[blocks[count]] = handle
        return self._add(blocks[:count])

    def _drop(self, handle: int) -> int:
        """Forget a run; how many blocks it had."""
        blocks = self._runs.pop(handle)
        if blocks[0] >= 0:
            del self._run_at[blocks[0]]
        return len(blocks)

    def _shorten(self, handle: int, count: int, from_front: bool) -> None:
        """Forget `count` blocks at one end of a longer run."""
        blocks = self._runs[handle]
        if not from_front:
            self._runs[handle] = blocks[:-count]
            return
        self._runs[handle] = blocks[count:]
        if blocks[0] >= 0:
            del self._run_at[blocks[0]]
            self._run_at[blocks[count]] = handle


def _common_end(chain: Sequence[int], start: int, stop: int, blocks: Sequence[int]) -> int:
    """Up to where `chain[start:stop]` goes along a run that begins with `chain[start]`."""
    low, high = 1, min(stop - start, len(blocks))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[start + middle - 1] == blocks[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return start + low
