from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.layout import KvLayout
from kv.part_range import (
    MAX_PART_BYTES,
    MIN_PART_LIMIT_BYTES,
    SMALL_OBJECT_BYTES,
    PartRange,
    covers_all_lanes,
    plan_parts,
)

LLAMA_13B = KvLayout(num_layers=40, num_kv_heads=40, head_dim=128, block_tokens=256, dtype="float16")
SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_tokens=16, dtype="float32")
TINY = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")

layouts = st.builds(
    KvLayout,
    num_layers=st.integers(1, 48),
    num_kv_heads=st.integers(1, 40),
    head_dim=st.sampled_from([8, 64, 128, 256]),
    block_tokens=st.sampled_from([1, 4, 16, 256]),
    dtype=st.sampled_from(["float32", "float16"]),
)
limits = st.sampled_from([MIN_PART_LIMIT_BYTES, 1 << 20, 3_000_000, MAX_PART_BYTES])


@given(layouts, st.integers(1, 40), limits, st.integers(1, 50))
def test_plan(layout: KvLayout, num_blocks: int, max_part_bytes: int, layer_groups: int) -> None:
    parts = plan_parts(layout, num_blocks, max_part_bytes=max_part_bytes, layer_groups=layer_groups)
    total_bytes = num_blocks * layout.block_bytes

    # Per run of blocks, every lane once; the runs cover the blocks in order.
    runs: dict[tuple[int, int], list[PartRange]] = {}
    for part in parts:
        runs.setdefault((part.first_block, part.num_blocks), []).append(part)
    next_block = 0
    for (first_block, count), members in runs.items():
        assert first_block == next_block
        next_block += count
        lanes = Counter(
            (layer, head)
            for part in members
            for layer in range(part.first_layer, part.first_layer + part.num_layers)
            for head in range(part.first_head, part.first_head + part.num_heads)
        )
        assert lanes == {(la, h): 1 for la in range(layout.num_layers) for h in range(layout.num_kv_heads)}
        assert covers_all_lanes(layout, members)
    assert next_block == num_blocks

    sizes = [part.num_bytes(layout) for part in parts]
    assert max(sizes) <= max(max_part_bytes, layout.page_bytes)
    if total_bytes <= SMALL_OBJECT_BYTES:
        assert len(parts) == 1
    else:
        assert min(sizes) > SMALL_OBJECT_BYTES
    # Few parts: at most three times as many as the bytes alone ask for, beyond the groups that were asked for.
    assert len(parts) <= 3 * -(-total_bytes // max_part_bytes) * (1 if layer_groups == 1 else layer_groups)


@given(layouts, st.integers(1, 40), st.integers(1, 6))
def test_layer_groups_are_made_where_parts_stay_large(layout: KvLayout, num_blocks: int, layer_groups: int) -> None:
    parts = plan_parts(layout, num_blocks, layer_groups=layer_groups)
    groups = {(part.first_layer, part.num_layers) for part in parts}
    smallest = (layout.num_layers // layer_groups) * layout.num_kv_heads * layout.page_bytes * num_blocks
    if layer_groups <= layout.num_layers and smallest > SMALL_OBJECT_BYTES:
        assert len(groups) >= layer_groups


def test_a_13b_block_of_256_tokens_is_cut_by_layers() -> None:
    parts = plan_parts(LLAMA_13B, 1)
    # One layer of one block is 5 MiB, so three fit in 16 MiB: 14 groups of two or three layers.
    assert len(parts) == 14
    assert {part.num_layers for part in parts} == {2, 3}
    assert {part.num_heads for part in parts} == {40}


def test_a_small_model_keeps_all_layers_together() -> None:
    # A block is 720 KiB: 22 fit in 16 MiB, and 64 blocks are cut into three even runs.
    parts = plan_parts(SMOLLM2, 64)
    assert [(part.first_block, part.num_blocks) for part in parts] == [(0, 21), (21, 21), (42, 22)]
    assert {part.num_layers for part in parts} == {30}


def test_a_small_extent_is_one_part_whatever_is_asked() -> None:
    assert plan_parts(TINY, 3, layer_groups=2) == [PartRange(0, 3, 0, 2, 0, 2)]


def test_a_page_larger_than_the_limit_is_a_part_of_its_own() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=256, block_tokens=1024, dtype="float32")
    assert layout.page_bytes == 2 * 1024 * 1024
    parts = plan_parts(layout, 2, max_part_bytes=1 << 20)
    assert len(parts) == 8
    assert {part.num_bytes(layout) for part in parts} == {layout.page_bytes}


def test_no_blocks_no_parts() -> None:
    assert plan_parts(TINY, 0) == []


def test_lanes_missing_or_doubled_are_seen() -> None:
    low, high = PartRange(0, 1, 0, 1, 0, 2), PartRange(0, 1, 1, 1, 0, 2)
    assert covers_all_lanes(TINY, [low, high])
    assert not covers_all_lanes(TINY, [low])
    assert not covers_all_lanes(TINY, [low, low])
    assert not covers_all_lanes(TINY, [low, high, high])


def test_shifted_moves_blocks_only() -> None:
    assert PartRange(2, 3, 1, 1, 0, 2).shifted(5) == PartRange(7, 3, 1, 1, 0, 2)


@pytest.mark.parametrize(
    ("num_blocks", "options", "message"),
    [
        (-1, {}, "num_blocks=-1"),
        (1, {"max_part_bytes": 1000}, "max_part_bytes=1000"),
        (1, {"layer_groups": 0}, "layer_groups=0"),
    ],
)
def test_bad_arguments_are_refused(num_blocks: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_parts(TINY, num_blocks, **options)
