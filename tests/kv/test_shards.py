"""Names and numbers say which shard they belong to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kv.disk.folder import extent_path
from kv.extents import file_name_of
from kv.keys import block_keys
from kv.room_order import RoomOrder
from kv.shards import hold_id_of, new_extent_id, own_hold_id, shard_of_chain, shard_of_extent
from tests.store_cell import chain


@given(st.binary(min_size=32, max_size=32), st.integers(1, 64))
def test_an_extent_belongs_to_the_shard_of_its_chain(root: bytes, num_shards: int) -> None:
    name = new_extent_id("n/1", root)
    assert name != new_extent_id("n/1", root)
    assert name.startswith("n/1/")
    assert name.endswith(root[:4].hex())
    assert shard_of_extent(name, num_shards) == shard_of_chain([root, b"whatever follows"], num_shards)
    assert 0 <= shard_of_extent(name, num_shards) < num_shards


def test_the_name_of_an_extent_is_that_of_its_file(tmp_path: Path) -> None:
    name = file_name_of(new_extent_id("s", chain("a", 1)[0]))
    assert extent_path(tmp_path, name).name == f"{name}.kv"


@given(st.integers(0, 2**63), st.integers(1, 64), st.data())
def test_holds_are_told_apart_by_shard(own_id: int, num_shards: int, data: st.DataObject) -> None:
    shard = data.draw(st.integers(0, num_shards - 1))
    assert own_hold_id(hold_id_of(own_id, shard, num_shards), num_shards) == (shard, own_id)


def test_prompts_are_spread_evenly_and_a_salt_moves_them() -> None:
    by_prompt = Counter(shard_of_chain(block_keys([number] * 4, 4, b"model", b""), 5) for number in range(2000))
    by_salt = Counter(shard_of_chain(block_keys([7] * 4, 4, b"model", b"%d" % number), 5) for number in range(2000))
    for counts in (by_prompt, by_salt):
        # Five standard deviations of a binomial.
        assert all(abs(counts[shard] - 400) < 5 * (2000 * 0.2 * 0.8) ** 0.5 for shard in range(5))


def test_a_chain_without_blocks_may_go_anywhere() -> None:
    assert shard_of_chain([], 3) in range(3)


def test_the_shard_whose_next_victim_is_oldest_is_asked_first() -> None:
    order = RoomOrder(4)
    assert order.shards("dram") == [0, 1, 2, 3]
    order.note(3, "dram", 5.0, now_s=100.0)
    order.note(1, "dram", 7.0, now_s=103.0)
    order.note(2, "disk", 50.0, now_s=103.0)
    assert order.shards("dram") == [0, 2, 3, 1], "those never heard of may have something older"
    assert order.shards("disk") == [0, 1, 3, 2]
    order.note(0, "dram", None, now_s=104.0)
    order.put_last(2, "dram")
    assert order.shards("dram") == [3, 1, 0, 2]
    # What the first has by now is no older than it was told.
    order.note(3, "dram", 0.0, now_s=200.0)
    order.note(1, "dram", 1.0, now_s=200.0)
    assert order.shards("dram") == [0, 1, 3, 2]
