from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kv.layout import KvLayout
from kv.part_range import MIN_PART_LIMIT_BYTES, covers_all_lanes
from kv.parts import encode_part
from kv.pull_plan import PlannedParts, plan_extents, plan_tail

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float32")
"""64 KiB a block, 12 blocks a part."""
WIDE = KvLayout(num_layers=4, num_kv_heads=2, head_dim=1024, block_tokens=16, dtype="float32")
"""1 MiB a block, two parts a block."""
KEYS = [bytes([number]) * 32 for number in range(60)]


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.sampled_from([LAYOUT, WIDE]))
def test_extents_hold_the_missing_blocks_in_order(is_missing: list[bool], layout: KvLayout) -> None:
    edges = [i for i, (a, b) in enumerate(zip([False, *is_missing], [*is_missing, False], strict=True)) if a != b]
    missing = list(zip(edges[::2], edges[1::2], strict=True))
    extents = plan_extents(layout, b"model", KEYS, missing, max_part_bytes=MIN_PART_LIMIT_BYTES)

    assert [key for extent in extents for key in extent.keys] == [KEYS[i] for i, here in enumerate(is_missing) if here]
    for extent in extents:
        assert covers_all_lanes(layout, (header.range for header in extent.headers))
        for header in extent.headers:
            first, count = header.range.first_block, header.range.num_blocks
            assert header.keys == extent.keys == tuple(KEYS[first : first + count])
            assert header.last_block_tokens == layout.block_tokens
            assert count * layout.block_bytes / len(extent.headers) <= MIN_PART_LIMIT_BYTES


def test_bytes_are_those_of_the_encoded_parts() -> None:
    (extent,) = plan_extents(WIDE, b"model", KEYS, [(3, 4)], max_part_bytes=MIN_PART_LIMIT_BYTES)
    parts = [encode_part(header, np.zeros(header.range.shape(WIDE), np.float32)) for header in extent.headers]
    assert len(parts) == 2
    assert extent.num_bytes == sum(part.nbytes for part in parts)


def test_a_tail_is_the_block_after_the_full_ones() -> None:
    tail = plan_tail(LAYOUT, b"model", 3 * 16 + 5)
    assert tail is not None
    (header,) = tail.headers
    assert (header.range.first_block, header.range.num_blocks) == (3, 1)
    assert (header.keys, header.last_block_tokens) == ((), 5)
    assert tail.keys == ()


def test_a_large_tail_is_several_parts() -> None:
    tail = plan_tail(WIDE, b"model", 5, max_part_bytes=MIN_PART_LIMIT_BYTES)
    assert tail is not None
    assert len(tail.headers) == 2
    assert covers_all_lanes(WIDE, (header.range for header in tail.headers))


def test_layer_groups_part_the_layers_of_extents_and_of_large_tails() -> None:
    def layers_of(planned: PlannedParts) -> list[tuple[int, int]]:
        return [(header.range.first_layer, header.range.num_layers) for header in planned.headers]

    (extent,) = plan_extents(LAYOUT, b"model", KEYS, [(0, 8)], layer_groups=2)
    assert layers_of(extent) == [(0, 2), (2, 2)]
    assert covers_all_lanes(LAYOUT, (header.range for header in extent.headers))
    large, small = (plan_tail(layout, b"model", 5, layer_groups=2) for layout in (WIDE, LAYOUT))
    assert large is not None
    assert layers_of(large) == [(0, 2), (2, 2)]
    assert small is not None
    assert layers_of(small) == [(0, 4)]


def test_full_blocks_have_no_tail() -> None:
    assert plan_tail(LAYOUT, b"model", 48) is None
    assert plan_tail(LAYOUT, b"model", 0) is None
