"""The copies that a move makes: a layer's weights, and pages of lanes, as tensors that a link can carry.

Replicas of one model pack a layer in the same way, so weights travel as one run of bytes. Pages travel in chunks of a
bounded size. All of this may be called beside steps, in any thread that holds `Grants.lock`: then nobody gives the
memory to others meanwhile. What a step writes into a page while it is read is copied again (`DirtyBlocks`). The weights
of a layer that is whole never change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from actors.engine.arena import Arena
from actors.engine.lane_table import Lane, LaneTable
from actors.engine.layer_memory import LayerMemory


class TransferError(ValueError):
    """What arrived is not what was to be copied. Nothing was changed, and the copy can be made again."""


@dataclass(frozen=True, slots=True)
class PageChunk:
    """Pages of some blocks in some lanes. Block ids are the home's, so they name the same content on both sides."""

    lanes: tuple[Lane, ...]
    blocks: tuple[int, ...]


@torch.inference_mode()
def read_weights(memory: LayerMemory, layer: int) -> tuple[torch.Tensor, bytes]:
    """A whole layer's weights, uint8 on the CPU, and their checksum (xxh3_128). On a CPU they are the arena's own
    memory: only to be read, and not after the layer has left. KeyError when they are not here."""
    if layer not in memory.weights:
        raise KeyError(f"the weights of layer {layer} are not here")
    data = memory.bytes_of(layer).cpu()
    return data, _checksum(data)


@torch.inference_mode()
def write_weights(memory: LayerMemory, layer: int, data: torch.Tensor, checksum: bytes) -> None:
    """Puts weights from `read_weights` into the memory that was granted for them: the layer can be run then. Where they
    have come already, for another instance, they are left as they are.

    Raises:
        TransferError: the layer has no memory here; another size, or another checksum.
    """
    if layer not in memory:
        raise TransferError(f"layer {layer} waits for no weights here")
    target = memory.bytes_of(layer)
    if data.dtype != torch.uint8 or data.shape != target.shape:
        raise TransferError(
            f"weights of layer {layer} came as {data.dtype} {list(data.shape)}; expected are {len(target)} bytes"
        )
    if _checksum(data) != checksum:
        raise TransferError(f"weights of layer {layer} came with another checksum than they were sent with")
    if layer not in memory.weights:
        target.copy_(data)
        memory.arrived(layer)


def page_chunks(arena: Arena, lanes: Sequence[Lane], blocks: Sequence[int], max_bytes: int) -> Iterator[PageChunk]:
    """All pages of `blocks` in `lanes`, in chunks of at most `max_bytes` (a page at least): as many blocks of all lanes
    as go into one, and of some of the lanes where not even one block of all does."""
    pages = max(1, max_bytes // arena.layout.page_bytes)
    lanes_each = min(len(lanes), pages)
    blocks_each = max(1, pages // max(1, len(lanes)))
    for first in range(0, len(blocks), blocks_each):
        for lane in range(0, len(lanes), max(1, lanes_each)):
            yield PageChunk(tuple(lanes[lane : lane + lanes_each]), tuple(blocks[first : first + blocks_each]))


@torch.inference_mode()
def read_chunk(arena: Arena, table: LaneTable, chunk: PageChunk) -> torch.Tensor:
    """The chunk's pages, [lanes, blocks, 2, block_tokens, head_dim] in the model's dtype, contiguous, on the CPU.

    Raises:
        TransferError: not all of these lanes and blocks are here.
    """
    index = _chunk_index(arena, table, chunk)
    return arena.page_words[index].cpu().view(arena.pages.dtype).view(_chunk_shape(arena, chunk))


@torch.inference_mode()
def write_chunk(arena: Arena, table: LaneTable, chunk: PageChunk, data: torch.Tensor) -> None:
    """Puts pages from `read_chunk` into the same lanes and blocks here. The caller tells whoever counts written blocks.

    Raises:
        TransferError: not all of these lanes and blocks are here, or `data` has another shape or dtype.
    """
    index, shape = _chunk_index(arena, table, chunk), _chunk_shape(arena, chunk)
    if data.dtype != arena.pages.dtype or tuple(data.shape) != shape or not data.is_contiguous():
        raise TransferError(
            f"pages came as {data.dtype} {list(data.shape)}; expected {arena.pages.dtype} {list(shape)}, contiguous"
        )
    words = arena.page_words
    words.index_copy_(0, index, data.view(len(index), -1).view(torch.int64).to(words.device))


def _chunk_shape(arena: Arena, chunk: PageChunk) -> tuple[int, ...]:
    return len(chunk.lanes), len(chunk.blocks), *arena.pages.shape[1:]


def _chunk_index(arena: Arena, table: LaneTable, chunk: PageChunk) -> torch.Tensor:
    """int64 [lanes * blocks]"""
    if missing := set(chunk.lanes) - table.lanes:
        raise TransferError(f"lanes {sorted(missing)} are not here")
    if not chunk.lanes or not chunk.blocks or not 0 <= min(chunk.blocks) <= max(chunk.blocks) < table.num_blocks:
        raise TransferError(
            f"blocks {chunk.blocks} of {len(chunk.lanes)} lanes; here are blocks 0 to {table.num_blocks - 1}"
        )
    blocks = torch.tensor(chunk.blocks, dtype=torch.int64, device=arena.pages.device)
    rows = [table.pages(layer)[table.heads(layer).index(head)] for layer, head in chunk.lanes]
    return torch.stack(rows)[:, blocks].flatten()


def _checksum(data: torch.Tensor) -> bytes:
    return xxhash.xxh3_128(data.numpy().data).digest()
