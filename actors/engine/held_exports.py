"""Ended sequences whose blocks are held until their KV was exported: for a decode worker that waits for it, or to be
found by later requests.

Of the second kind, answers that are being published, nobody waits. Whoever needs blocks takes theirs, oldest answer
first (ours).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from actors.engine.block_manager import BlockManager
from actors.engine.sequence import SequenceState
from actors.engine.sequence_blocks import SequenceBlocks


class HeldExports(Mapping[str, SequenceState]):
    """By request, in the order of their ends. Other threads may ask whether a request is among them: as long as it is,
    its blocks are nobody else's."""

    def __init__(self, pool: BlockManager, blocks: SequenceBlocks) -> None:
        self.num_given_up = 0
        """Publications that have ended early, for want of blocks."""
        self._pool = pool
        self._blocks = blocks
        self._held: dict[str, SequenceState] = {}

    def __getitem__(self, request_id: str) -> SequenceState:
        return self._held[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_reclaimable(self) -> int:
        """Blocks that nobody holds but answers being published."""
        return self._pool.num_freed_by(block for answer in self._answers() for block in answer.block_ids)

    def hold(self, sequence: SequenceState) -> None:
        """Keeps the blocks of a sequence that has ended."""
        self._held[sequence.request_id] = sequence

    def release(self, request_id: str) -> bool:
        """An export ended, well or not: its blocks go back. False when there is none of this request."""
        sequence = self._held.pop(request_id, None)  # first: from here on its blocks may be another's
        if sequence is None:
            return False
        self._blocks.release(sequence)
        return True

    def give_up_answers(self, shortage: int, spared: Collection[int] = ()) -> None:
        """Ends publications, oldest first, until `shortage` more blocks can be had beside those `spared`. None of them
        when all together would not do: then there is something else to wait for."""
        given_up: list[str] = []
        blocks: list[int] = []
        for answer in self._answers():
            given_up.append(answer.request_id)
            blocks += [block for block in answer.block_ids if block not in spared]
            if self._pool.num_freed_by(blocks) >= shortage:
                break
        else:
            return
        for request_id in given_up:
            self.release(request_id)
        self.num_given_up += len(given_up)

    def _answers(self) -> Iterator[SequenceState]:
        return (sequence for sequence in self._held.values() if not sequence.request.hand_over)
