"""Which blocks of an instance were written after a point in time, so that a move copies while the instance serves and,
at the end, copies again only what has changed since."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class DirtyBlocks:
    """Remembers for each block when it was last written. Pure bookkeeping, used from the engine's thread.

    A point in time is a number that rises with every call of `point`. A write counts from when it is reported, which is
    after it is done, so a copy that was made between the two is made again. A block is reported, too, when a sequence
    is given it, whose fetch may write to it at any moment from then on: a copy that was made before is of something
    else, and none is made early after it, since nobody finds the block by key before the fetch has ended.
    """

    def __init__(self) -> None:
        self._now = 0
        self._written: dict[int, int] = {}

    def point(self) -> int:
        """This moment: whatever is reported from here on is `since` it."""
        self._now += 1
        return self._now - 1

    def wrote(self, blocks: Iterable[int]) -> None:
        """K and V of some of the blocks' tokens have just been written."""
        self._written.update(dict.fromkeys(blocks, self._now))

    def relocated(self, moves: Mapping[int, int], num_blocks: int) -> None:
        """Blocks' content has gone to other blocks, and there are `num_blocks` now."""
        self.wrote(moves.values())
        self._written = {block: when for block, when in self._written.items() if block < num_blocks}

    def since(self, point: int) -> list[int]:
        """Blocks written after `point`, ascending."""
        return sorted(block for block, when in self._written.items() if when > point)
