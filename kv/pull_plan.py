"""What a node store asks a worker for: the extents to store, and the tail to hand over. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kv.layout import KvLayout
from kv.part_range import MAX_PART_BYTES, plan_parts
from kv.parts import PartHeader, encoded_bytes


@dataclass(frozen=True, slots=True)
class PlannedParts:
    """Parts of the same blocks that hold every layer and KV head once: an extent to be, or a tail.

    The headers are what the worker's parts must say, word for word.
    """

    headers: tuple[PartHeader, ...]
    num_bytes: int
    """Bytes of the encoded parts together."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """Keys of the blocks; a tail has none."""
        return self.headers[0].keys


def plan_extents(
    layout: KvLayout,
    fingerprint: bytes,
    keys: Sequence[bytes],
    missing: Sequence[tuple[int, int]],
    *,
    max_part_bytes: int = MAX_PART_BYTES,
    layer_groups: int = 1,
) -> list[PlannedParts]:
    """Extents for the block ranges [start, stop) of `missing`, first block first.

    Blocks that the parts' size limit keeps apart are extents of their own, so that eviction, and the loss of a part,
    takes little.

    Args:
        keys: the chain of the request, from its first block.
        max_part_bytes, layer_groups: see `plan_parts`.
    """
    extents = []
    for start, stop in missing:
        ranges = plan_parts(layout, stop - start, max_part_bytes=max_part_bytes, layer_groups=layer_groups)
        for _, group in groupby(ranges, key=lambda part: part.first_block):
            headers = tuple(
                PartHeader(
                    layout,
                    fingerprint,
                    part.shifted(start),
                    tuple(keys[start + part.first_block : start + part.first_block + part.num_blocks]),
                    layout.block_tokens,
                )
                for part in group
            )
            extents.append(_planned(headers))
    return extents


def plan_tail(
    layout: KvLayout,
    fingerprint: bytes,
    num_tokens: int,
    *,
    max_part_bytes: int = MAX_PART_BYTES,
    layer_groups: int = 1,
) -> PlannedParts | None:
    """The parts of the partial last block of `num_tokens` tokens; None when the last block is full.

    `max_part_bytes` and `layer_groups` as in `plan_parts`: a block that is small stays one part, whatever they are.
    """
    tail_tokens = num_tokens % layout.block_tokens
    if tail_tokens == 0:
        return None
    first_block = layout.full_blocks(num_tokens)
    ranges = plan_parts(layout, 1, max_part_bytes=max_part_bytes, layer_groups=layer_groups)
    return _planned(
        tuple(PartHeader(layout, fingerprint, part.shifted(first_block), (), tail_tokens) for part in ranges)
    )


def _planned(headers: tuple[PartHeader, ...]) -> PlannedParts:
    return PlannedParts(headers, sum(encoded_bytes(header) for header in headers))
