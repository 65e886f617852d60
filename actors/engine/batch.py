"""The tensors of one step, built from the scheduler's plan.

Rows are tokens. Decode rows come first, one a sequence; each prefill chunk's rows follow. Block ids are logical: the
attention backend turns them into pages, layer by layer, through the lane table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.engine.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """One prompt chunk: rows `first_row` to `first_row + num_rows`; its last token sees `context_tokens` tokens."""

    first_row: int
    num_rows: int
    context_tokens: int
    blocks: torch.Tensor
    """int64 [blocks that hold the context]"""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step over T rows, D of them decodes. All tensors int64 on the engine's device."""

    token_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[T]"""
    write_blocks: torch.Tensor
    """[T] block that receives the row's K and V"""
    write_offsets: torch.Tensor
    """[T] and the place in it"""
    decode_blocks: torch.Tensor
    """[D, longest block table], padded with block 0"""
    decode_context: torch.Tensor
    """[D] tokens each decode row sees, itself included"""
    prefills: tuple[PrefillRows, ...]

    @property
    def num_decodes(self) -> int:
        """D"""
        return self.decode_context.shape[0]


def build_batch(
    decodes: Sequence[Chunk], prefills: Sequence[Chunk], block_tokens: int, device: torch.device
) -> StepBatch:
    """Lays out the chunks' rows. A chunk's tokens start at its sequence's `num_computed`."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_blocks: list[int] = []
    prefill_rows: list[PrefillRows] = []
    for chunk in decodes:
        sequence, position = chunk.sequence, chunk.sequence.num_computed
        token_ids.append(sequence.tokens[position])
        positions.append(position)
        write_blocks.append(sequence.block_ids[position // block_tokens])
    for chunk in prefills:
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        stop = start + chunk.num_tokens
        blocks = sequence.block_ids[: -(-stop // block_tokens)]
        prefill_rows.append(
            PrefillRows(len(token_ids), chunk.num_tokens, stop, torch.tensor(blocks, dtype=torch.int64, device=device))
        )
        token_ids.extend(sequence.tokens[start:stop])
        positions.extend(range(start, stop))
        write_blocks.extend(sequence.block_ids[position // block_tokens] for position in range(start, stop))
    row_positions = torch.tensor(positions, dtype=torch.int64)
    tables = [chunk.sequence.block_ids for chunk in decodes]
    widest = max((len(table) for table in tables), default=0)
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
        positions=row_positions.to(device),
        write_blocks=torch.tensor(write_blocks, dtype=torch.int64).to(device),
        write_offsets=(row_positions % block_tokens).to(device),
        decode_blocks=torch.tensor([table + [0] * (widest - len(table)) for table in tables], dtype=torch.int64)
        .view(len(tables), widest)
        .to(device),
        decode_context=(row_positions[: len(tables)] + 1).to(device),
        prefills=tuple(prefill_rows),
    )
