"""KV that somebody copies out of the blocks: of ended requests, and of prompts that are still being computed.

A long prompt is computed in chunks. The blocks that its chunks fill are final, so they can be copied while the next
chunk runs; at its end only those of the last chunk are left to be handed over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.engine.block_manager import BlockManager
from actors.engine.device_event import DeviceEvent
from actors.engine.sequence import SequenceState


@dataclass(frozen=True, slots=True)
class Export:
    """What is held for a copy under `export_id`. Does not change."""

    export_id: str
    block_ids: tuple[int, ...]
    keys: tuple[bytes, ...]
    """Of the full blocks."""
    num_tokens: int
    """Tokens whose KV is in the blocks, counted from the request's first."""
    mark: DeviceEvent | None = field(default=None, compare=False)
    """Their KV is there when the device comes to this: it is behind the step that computed the last of them."""


class EarlyExports:
    """Exports of prompts that are still being computed, at most one a prompt at a time. Used from the engine's thread,
    but for `in` and `content`.

    Args:
        min_blocks: a prompt has filled so many blocks, at least, that no export of it has held yet.
    """

    def __init__(self, blocks: BlockManager, block_tokens: int, min_blocks: int) -> None:
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._min_blocks = min_blocks
        self._held: dict[str, tuple[SequenceState, Export]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, export_id: str) -> bool:
        """From any thread: what was read of the blocks before this said True is whole."""
        return export_id in self._held

    def pinned_blocks(self) -> set[int]:
        """Blocks that somebody copies out."""
        return {block for _, export in self._held.values() for block in export.block_ids}

    def begin(self, sequence: SequenceState) -> Export | None:
        """Holds the full blocks of a running prompt until `end`. None when they are too few, or some are held."""
        full = sequence.num_computed // self._block_tokens
        known = max(sequence.num_exported_blocks, (sequence.num_cached_tokens or 0) // self._block_tokens)
        if sequence.is_exporting or full - known < self._min_blocks:
            return None
        blocks = tuple(sequence.block_ids[:full])
        keys = tuple(sequence.keys(self._block_tokens)[:full])
        # No request has such an id: an ingress gives hexadecimal digits and a number.
        export = Export(f"{sequence.request_id}@{full}", blocks, keys, full * self._block_tokens, sequence.mark)
        self._blocks.share(blocks)
        self._held[export.export_id] = (sequence, export)
        sequence.is_exporting, sequence.num_exported_blocks = True, full
        return export

    def content(self, export_id: str) -> Export:
        """KeyError when it has ended. From any thread."""
        return self._held[export_id][1]

    def end(self, export_id: str) -> bool:
        """The copy ended, well or not. False when there is none of this id."""
        sequence, export = self._held.pop(export_id, (None, None))  # first: from here on its blocks may be another's
        if sequence is None or export is None:
            return False
        sequence.is_exporting = False
        self._blocks.release(export.block_ids)
        return True

    def end_all(self) -> None:
        """What is in the blocks is void."""
        for export_id in list(self._held):
            self.end(export_id)


def content_of(sequence: SequenceState, block_tokens: int) -> Export:
    """What an ended request left, its partly filled last block included."""
    full = sequence.num_computed // block_tokens
    keys = tuple(sequence.keys(block_tokens)[:full])
    return Export(sequence.request_id, tuple(sequence.block_ids), keys, sequence.num_computed, sequence.mark)
