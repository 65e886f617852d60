"""Copies KV between an engine's pages and the payload of parts (design decision D3).

Called off the engine's thread: the blocks concerned are held by an export, or by a fetching sequence, and nobody else
touches their pages meanwhile. But a device does its work later: it may still be at what it was given before they were
held so. `after` says how far it must have come: the sequence's, or the export's, `mark`. None is always right and may
wait for too much: then it is all that the device was given by the last step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.arena import page_rows
from actors.engine.device_event import DeviceEvent
from actors.engine.loading import LoadedModel
from kv.part_range import PartRange


@torch.inference_mode()
def read_pages(
    loaded: LoadedModel,
    part: PartRange,
    block_ids: Sequence[int],
    payload: NDArray[Any],
    after: DeviceEvent | None = None,
) -> None:
    """Fills `payload` [blocks, layers, heads, 2, block_tokens, head_dim] from the blocks' pages.

    `block_ids` are the request's blocks; `part.first_block` counts from the first of them. Half-precision payloads are
    int16 views of the same bits.
    """
    index = _page_index(loaded, part, block_ids[part.first_block : part.first_block + part.num_blocks])
    loaded.copies.read(index, _payload_rows(loaded, payload), after)


@torch.inference_mode()
def write_pages(
    loaded: LoadedModel,
    part: PartRange,
    block_ids: Sequence[int],
    payload: NDArray[Any],
    after: DeviceEvent | None = None,
) -> DeviceEvent | None:
    """Stores `payload`, shaped as in `read_pages`, into the pages of `block_ids`, one id for each of the part's blocks.

    The payload may be a read-only view of the object store: it is only read, and no more after the return. The pages
    may be filled later: at the event that is returned, which also comes after all writes that were begun before. None:
    they have been filled.
    """
    if len(block_ids) != part.num_blocks:
        raise ValueError(f"{len(block_ids)} block ids were given for a part of {part.num_blocks} blocks")
    # torch warns about read-only arrays; frombuffer over a read-only buffer does too. Nothing writes to the source.
    source = _payload_rows(loaded, _writable_view(payload))
    return loaded.copies.write(_page_index(loaded, part, block_ids), source, after)


@torch.inference_mode()
def clear_pages(loaded: LoadedModel, block_ids: Sequence[int]) -> None:
    """Zeroes all pages of blocks that are about to be filled by another request than the last one.

    A request whose numbers overflowed leaves NaN behind, and attention that adds -inf to masked scores and multiplies
    masked values by weights of zero would pass it on.
    """
    loaded.lanes.clear_blocks(block_ids)
    loaded.copies.computed()


def _payload_rows(loaded: LoadedModel, payload: NDArray[Any]) -> torch.Tensor:
    """The same memory as rows of pages."""
    return page_rows(torch.from_numpy(payload).view(-1, *loaded.arena.pages.shape[1:]))


def _page_index(loaded: LoadedModel, part: PartRange, block_ids: Sequence[int]) -> torch.Tensor:
    """int64 [blocks * layers * heads] page of each (block, layer, head), in the payload's order; in host memory."""
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    by_layer = []
    for layer in range(part.first_layer, part.first_layer + part.num_layers):
        heads = loaded.lanes.heads(layer)
        rows = [heads.index(head) for head in range(part.first_head, part.first_head + part.num_heads)]
        by_layer.append(loaded.lanes.host_pages(layer)[rows][:, blocks])
    return torch.stack(by_layer).permute(2, 0, 1).reshape(-1)


def _writable_view(array: NDArray[Any]) -> NDArray[Any]:
    """The same memory under an array that claims to be writable, so that torch takes it without a copy or a warning."""
    if array.flags.writeable:
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Exposed(interface, array))


class _Exposed:
    """Hands numpy an array interface and keeps the real owner of the memory alive."""

    def __init__(self, interface: dict[str, Any], owner: NDArray[Any]) -> None:
        self.__array_interface__ = interface
        self.owner = owner
