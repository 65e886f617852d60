"""Which blocks are somewhere, in runs: blocks of one prefix that were last used together.

A table gives the answers that one entry for each block would give, at the price of one entry for each run: a run from
which only the first blocks are used is cut in two, and a run may lose blocks at either end (ours).

Everything rests on what an id of a trace stands for: a whole prefix. So a prompt that has a block has all blocks before
it; the blocks of a run that a prompt has are the first ones of it; and ids rise along a prompt, since a prefix appears
before what continues it. Most runs are consecutive blocks, but one may skip some that were somewhere else already.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def compact(blocks: Sequence[int]) -> Sequence[int]:
    """The same ids, as a `range` where they are consecutive: most are, and it takes no memory for each."""
    first = blocks[0]
    if blocks[-1] - first == len(blocks) - 1:
        return range(first, first + len(blocks))
    return blocks


class RunTable:
    """Runs by handle. Ids below 0 are blocks that no prompt asks for: they take room and are never found."""

    def __init__(self) -> None:
        self._run_of: dict[int, int] = {}
        self._runs: dict[int, Sequence[int]] = {}
        self._next_handle = 0

    def has(self, block: int) -> bool:
        """Whether a block is here."""
        return block in self._run_of

    def matched(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Where the blocks `chain[start:stop]` that follow each other here end; `start` where the first is missing.

        Args:
            chain: a prompt's blocks from its first one on.
        """
        run_of = self._run_of.get
        runs = self._runs
        while start < stop:
            handle = run_of(chain[start])
            if handle is None:
                return start
            blocks = runs[handle]
            # Mostly the whole run: from its first block on, and with its last one where it must be if none is skipped.
            last = blocks[-1]
            end = start + len(blocks)
            if end <= stop and chain[end - 1] == last and chain[start] == blocks[0]:
                start = end
            elif chain[start] == last:
                start += 1
            else:
                start = self._end_in_run(chain, start, stop, blocks)
        return start

    def missing(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Where the blocks `chain[start:stop]` that follow each other and are not here end."""
        run_of = self._run_of
        while start < stop and chain[start] not in run_of:
            start += 1
        return start

    def _end_in_run(self, chain: Sequence[int], start: int, stop: int, blocks: Sequence[int]) -> int:
        """End of the blocks from `chain[start]` on that lie in a run which has that one."""
        offset = bisect_right(blocks, chain[start]) - 1 - start
        low, high = start + 1, min(stop, len(blocks) - offset)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] == blocks[middle - 1 + offset]:
                low = middle
            else:
                high = middle - 1
        return low

    def _runs_within(self, chain: Sequence[int], stop: int) -> list[int]:
        """Handles of the runs that hold `chain[:stop]`, in this order; one that sticks out is cut first."""
        run_of = self._run_of.get
        runs = self._runs
        handles = []
        index = 0
        while index < stop:
            handle = run_of(chain[index])
            if handle is None:
                index += 1
                continue
            blocks = runs[handle]
            end = index + len(blocks)
            if end > stop or chain[end - 1] != blocks[-1]:
                end = self._end_in_run(chain, index, stop, blocks)
                handle = self._cut(handle, end - index)
            handles.append(handle)
            index = end
        return handles

    def _add(self, blocks: Sequence[int]) -> int:
        """A new run of blocks that are not here; its handle."""
        handle = self._next_handle
        self._next_handle += 1
        blocks = compact(blocks)
        self._runs[handle] = blocks
        if blocks[0] >= 0:
            self._run_of.update(dict.fromkeys(blocks, handle))
        return handle

    def _cut(self, handle: int, count: int) -> int:
        """Make the first `count` blocks of a run a run of their own; its handle. The others keep theirs."""
        blocks = self._runs[handle]
        self._runs[handle] = compact(blocks[count:])
        return self._add(blocks[:count])

    def _drop(self, handle: int) -> int:
        """Forget a run; how many blocks it had."""
        blocks = self._runs.pop(handle)
        self._unpoint(blocks)
        return len(blocks)

    def _shorten(self, handle: int, count: int, from_front: bool) -> None:
        """Forget `count` blocks at one end of a longer run."""
        blocks = self._runs[handle]
        gone, self._runs[handle] = (
            (blocks[:count], blocks[count:]) if from_front else (blocks[-count:], blocks[:-count])
        )
        self._unpoint(gone)

    def _unpoint(self, blocks: Sequence[int]) -> None:
        if blocks[0] >= 0:
            run_of = self._run_of
            for block in blocks:
                del run_of[block]
