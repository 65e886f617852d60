"""Which pages a part holds, and how an extent is cut into parts. Pure arithmetic, no arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kv.layout import KvLayout

SMALL_OBJECT_BYTES = 100 * 1024
"""An object of up to this size lives in its owner's heap instead of the object store (Ray's
`max_direct_call_object_size`)."""

MAX_PART_BYTES = 16 * 1024 * 1024
"""Payload bytes of a part at most: a few of them already move at full bandwidth, and one lost part costs little."""

MIN_PART_LIMIT_BYTES = 8 * SMALL_OBJECT_BYTES
"""Lowest `max_part_bytes`: even cuts leave parts of a sixth of the limit at least, which must not be small."""


class LaneRange(NamedTuple):
    """Consecutive layers x KV heads. A plain tuple: the store's index has one for each part, and shares equal ones."""

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int


@dataclass(frozen=True, slots=True)
class PartRange:
    """Consecutive blocks x layers x KV heads. Blocks count from wherever the context says (an extent or a request)."""

    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int

    @property
    def lanes(self) -> LaneRange:
        """Its layers and KV heads."""
        return LaneRange(self.first_layer, self.num_layers, self.first_head, self.num_heads)

    def shape(self, layout: KvLayout) -> tuple[int, int, int, int, int, int]:
        """Shape of the payload: [blocks, layers, heads, 2, block_tokens, head_dim]."""
        return (self.num_blocks, self.num_layers, self.num_heads, 2, layout.block_tokens, layout.head_dim)

    def num_bytes(self, layout: KvLayout) -> int:
        """Bytes of the payload."""
        return self.num_blocks * self.num_layers * self.num_heads * layout.page_bytes

    def shifted(self, blocks: int) -> PartRange:
        """The same pages, `blocks` blocks further on."""
        return replace(self, first_block=self.first_block + blocks)


def plan_parts(
    layout: KvLayout, num_blocks: int, *, max_part_bytes: int = MAX_PART_BYTES, layer_groups: int = 1
) -> list[PartRange]:
    """Cut `num_blocks` consecutive blocks into few parts, each page in exactly one of them (ours).

    Blocks are cut first, because a run of blocks with all its layers is useful by itself; layers only when one block's
    layers are more than `max_part_bytes`, and heads only when one layer of one block is. All cuts are even, so that no
    small rest remains. The result is a grid: parts with equal `first_block` also have equal `num_blocks`.

    Args:
        num_blocks: at least 0; block offsets in the result count from the first of them.
        max_part_bytes: payload of a part at most, unless one page is larger. At least
            `MIN_PART_LIMIT_BYTES`.
        layer_groups: cut the layers into at least so many groups, which can then be fetched one after the other;
            fewer where the parts would be too small.

    Returns:
        Parts ordered by block, layer, head. None has `SMALL_OBJECT_BYTES` or less, unless all blocks together do; then
        there is one part.

    Raises:
        ValueError: an argument is out of its range.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks={num_blocks} is not allowed: give at least 0")
    if max_part_bytes < MIN_PART_LIMIT_BYTES:
        raise ValueError(f"max_part_bytes={max_part_bytes} is not allowed: give at least {MIN_PART_LIMIT_BYTES}")
    if layer_groups < 1:
        raise ValueError(f"layer_groups={layer_groups} is not allowed: give at least 1")
    if num_blocks == 0:
        return []

    layer_bytes = layout.num_kv_heads * layout.page_bytes
    groups = min(layer_groups, layout.num_layers)
    while groups > 1 and (layout.num_layers // groups) * layer_bytes * num_blocks <= SMALL_OBJECT_BYTES:
        groups -= 1

    heads = _even_cuts(layout.num_kv_heads, max_part_bytes // layout.page_bytes)
    layers_limit = 1 if len(heads) > 1 else max_part_bytes // layer_bytes
    layers = _even_cuts(layout.num_layers, layers_limit, at_least=groups)
    most_pages = max(count for _, count in layers) * max(count for _, count in heads)
    blocks = _even_cuts(num_blocks, max_part_bytes // (most_pages * layout.page_bytes))
    return [
        PartRange(first_block, block_count, first_layer, layer_count, first_head, head_count)
        for first_block, block_count in blocks
        for first_layer, layer_count in layers
        for first_head, head_count in heads
    ]


def covers_all_lanes(layout: KvLayout, ranges: Iterable[PartRange]) -> bool:
    """Whether parts of the same blocks hold every layer and KV head exactly once."""
    lanes = [
        (layer, head)
        for part in ranges
        for layer in range(part.first_layer, part.first_layer + part.num_layers)
        for head in range(part.first_head, part.first_head + part.num_heads)
    ]
    return len(lanes) == len(set(lanes)) == layout.num_layers * layout.num_kv_heads


def _even_cuts(total: int, limit: int, at_least: int = 1) -> list[tuple[int, int]]:
    """(first, count) of the fewest pieces, `at_least` so many, of at most `limit` (or 1) that differ by one at most."""
    pieces = max(at_least, -(-total // max(1, limit)))
    borders = [piece * total // pieces for piece in range(pieces + 1)]
    return [(first, end - first) for first, end in pairwise(borders)]
