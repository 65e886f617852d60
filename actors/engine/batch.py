"""The tensors of one step, built from the scheduler's plan.

Rows are tokens. Decode rows come first, one a sequence; each prefill chunk's rows follow. Block ids are logical: the
attention backend turns them into pages, layer by layer, through the lane table.

All of a step's integers lie in one host tensor, so that a step costs one transfer to the device, where the fields are
views of it. A captured decode step keeps the device tensor and has it overwritten each time (see `cuda_graphs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.engine.step_plan import Chunk


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
    """[D, at least the longest block table]; a row's table is followed by its own last block over and over, so that no
    row ever reads another request's memory"""
    decode_context: torch.Tensor
    """[D] tokens each decode row sees, itself included"""
    prefill_blocks: torch.Tensor
    """[P, longest block table], filled up like `decode_blocks`"""
    prefill_rows: torch.Tensor
    """[P] rows of each chunk"""
    prefill_context: torch.Tensor
    """[P] tokens each chunk's last row sees"""
    sampled_rows: torch.Tensor
    """[rows that are sampled from], rising"""
    prefills: tuple[PrefillRows, ...]
    """The same chunks for the host."""

    @property
    def num_decodes(self) -> int:
        """D"""
        return self.decode_context.shape[0]


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many of everything a step has. It fixes where each field lies in the packed tensor."""

    num_rows: int
    num_decodes: int
    decode_width: int
    num_prefills: int = 0
    prefill_width: int = 0

    @property
    def num_integers(self) -> int:
        """Length of the packed tensor."""
        return sum(math.prod(size) for size in self._sizes())

    def split(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Views of `packed` [num_integers] in the order of StepBatch's tensors."""
        views, start = [], 0
        for size in self._sizes():
            stop = start + math.prod(size)
            views.append(packed[start:stop].view(size))
            start = stop
        return views

    def _sizes(self) -> tuple[tuple[int, ...], ...]:
        rows, decodes, prefills = (self.num_rows,), (self.num_decodes,), (self.num_prefills,)
        return (
            rows, rows, rows, rows,
            (self.num_decodes, self.decode_width), decodes,
            (self.num_prefills, self.prefill_width), prefills, prefills,
            (self.num_decodes + self.num_prefills,),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step on the host, ready to be copied."""

    packed: torch.Tensor
    """int64 [shape.num_integers]; pinned where it goes to a CUDA device"""
    shape: StepShape
    num_sampled: int
    chunks: tuple[tuple[int, int, int], ...]
    """(first row, rows, context tokens) of each prompt chunk"""

    def batch(self, on_device: torch.Tensor, block_tokens: int) -> StepBatch:
        """The fields as views of `on_device`, a copy of `packed` on the device."""
        (
            token_ids, positions, write_blocks, write_offsets, decode_blocks, decode_context, prefill_blocks,
            prefill_rows, prefill_context, sampled_rows,
        ) = self.shape.split(on_device)  # fmt: skip
        prefills = tuple(
            PrefillRows(first_row, num_rows, context, prefill_blocks[index, : -(-context // block_tokens)])
            for index, (first_row, num_rows, context) in enumerate(self.chunks)
        )
        return StepBatch(
            token_ids, positions, write_blocks, write_offsets, decode_blocks, decode_context, prefill_blocks,
            prefill_rows, prefill_context, sampled_rows[: self.num_sampled], prefills,
        )  # fmt: skip


def build_batch(
    decodes: Sequence[Chunk], prefills: Sequence[Chunk], block_tokens: int, device: torch.device
) -> StepBatch:
    """Lays out the chunks' rows on `device`."""
    step = pack_step(decodes, prefills, block_tokens, pin_memory=device.type == "cuda")
    return step.batch(step.packed.to(device, non_blocking=True), block_tokens)


def pack_step(
    decodes: Sequence[Chunk],
    prefills: Sequence[Chunk],
    block_tokens: int,
    *,
    decode_width: int = 0,
    pin_memory: bool = False,
) -> PackedStep:
    """The step's integers in one host tensor. The decodes' block tables are at least `decode_width` blocks wide.

    Pinned memory comes from torch's cache, which gives it to nobody else before the copy from it is done.
    """
    token_list: list[int] = []
    position_list: list[int] = []
    write_list: list[int] = []
    sampled_list: list[int] = []
    tables: list[list[int]] = []
    chunks: list[tuple[int, int, int]] = []
    for chunk in (*decodes, *prefills):
        sequence, start = chunk.sequence, chunk.first_token
        stop = start + chunk.num_tokens
        chunks.append((len(token_list), chunk.num_tokens, stop))
        token_list.extend(sequence.tokens[start:stop])
        position_list.extend(range(start, stop))
        write_list.extend(sequence.block_ids[position // block_tokens] for position in range(start, stop))
        tables.append(sequence.block_ids[: -(-stop // block_tokens)])
        if chunk.samples:
            sampled_list.append(len(token_list) - 1)
    decode_tables, prefill_tables = tables[: len(decodes)], tables[len(decodes) :]
    shape = StepShape(
        num_rows=len(token_list),
        num_decodes=len(decodes),
        decode_width=max([decode_width, *map(len, decode_tables)]) if decodes else 0,
        num_prefills=len(prefills),
        prefill_width=max(map(len, prefill_tables), default=0),
    )
    packed = torch.empty(shape.num_integers, dtype=torch.int64, pin_memory=pin_memory)
    (
        token_ids, positions, write_blocks, write_offsets, decode_blocks, decode_context, prefill_blocks, prefill_rows,
        prefill_context, sampled_rows,
    ) = (view.numpy() for view in shape.split(packed))  # fmt: skip
    token_ids[:] = token_list
    positions[:] = position_list
    write_blocks[:] = write_list
    write_offsets[:] = positions % block_tokens
    decode_context[:] = positions[: len(decodes)] + 1
    for target, own_tables in ((decode_blocks, decode_tables), (prefill_blocks, prefill_tables)):
        for row, table in zip(target, own_tables, strict=True):
            row[: len(table)] = table
            row[len(table) :] = table[-1]
    prefill_chunks = chunks[len(decodes) :]
    prefill_rows[:] = [num_rows for _, num_rows, _ in prefill_chunks]
    prefill_context[:] = [context for _, _, context in prefill_chunks]
    sampled_rows[: len(sampled_list)] = sampled_list
    sampled_rows[len(sampled_list) :] = 0
    return PackedStep(packed, shape, len(sampled_list), tuple(prefill_chunks))


def rows_of(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[S, hidden]: of [T, hidden], those at `rows` [S], which rise: as many as there are means all of them."""
    return hidden if rows.shape[0] == hidden.shape[0] else hidden.index_select(0, rows)
