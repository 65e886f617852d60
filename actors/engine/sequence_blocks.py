"""The blocks of sequences: given to them, filled, found by others when they are full, and taken back.

No policy: who gets blocks, and from whom, is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from actors.engine.block_manager import BlockManager
from actors.engine.dirty_blocks import DirtyBlocks
from actors.engine.sequence import SequenceState


class SequenceBlocks:
    """Keeps a sequence's own account of its blocks and the pool's in step.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, pool: BlockManager, block_tokens: int) -> None:
        self.dirty = DirtyBlocks()
        self._pool = pool
        self._block_tokens = block_tokens

    def extend(self, sequence: SequenceState, count: int) -> None:
        """Gives it `count` more blocks, which must be available."""
        blocks = self._pool.allocate(count)
        # What they held is nobody's any more, and a fetch may write to them at any moment from now on.
        self.dirty.wrote(blocks)
        sequence.block_ids += blocks
        sequence.fresh_blocks += blocks

    def release(self, sequence: SequenceState) -> None:
        """Takes all its blocks back."""
        self._pool.release(sequence.block_ids)
        sequence.block_ids, sequence.fresh_blocks = [], []

    def to_be_filled(self, sequence: SequenceState, num_tokens: int) -> None:
        """A fetch brings the first `num_tokens` tokens' KV, and with it all of the pages of their blocks, the last one
        included. The other blocks still hold what some earlier request left there."""
        num_filled = -(-num_tokens // self._block_tokens)
        sequence.fresh_blocks = sequence.block_ids[max(num_filled, sequence.num_registered) :]

    def wrote(self, sequence: SequenceState, first_token: int, num_tokens: int) -> None:
        """The KV of so many of its tokens has been written."""
        stop = -(-(first_token + num_tokens) // self._block_tokens)
        self.dirty.wrote(sequence.block_ids[first_token // self._block_tokens : stop])

    def register_full(self, sequence: SequenceState) -> None:
        """Those of its blocks that are computed and full can be found by others."""
        full = sequence.num_computed // self._block_tokens
        if full > sequence.num_registered:
            keys = sequence.keys(self._block_tokens)
            for index in range(sequence.num_registered, full):
                self._pool.register(sequence.block_ids[index], keys[index])
            sequence.num_registered = full

    def relocate(self, sequences: Iterable[SequenceState], moves: Mapping[int, int], num_blocks: int) -> None:
        """Blocks have become other blocks, and the pool will have `num_blocks`. `sequences`: all that may have some of
        them."""
        for sequence in sequences:
            if not moves.keys().isdisjoint(sequence.block_ids):
                sequence.block_ids = [moves.get(block, block) for block in sequence.block_ids]
                sequence.fresh_blocks = [moves.get(block, block) for block in sequence.fresh_blocks]
        self._pool.relocate(moves)
        self.dirty.relocated(moves, num_blocks)
