from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from actors.engine.block_manager import BlockManager, NoFreeBlocksError


def test_shared_prefix_is_found_and_counted_once() -> None:
    blocks = BlockManager(4)
    first = blocks.allocate(2)
    for block, key in zip(first, (b"a", b"b"), strict=True):
        blocks.register(block, key)
    assert blocks.match_prefix([b"a", b"b", b"c"]) == first
    assert blocks.match_prefix([b"x", b"a"]) == []
    blocks.share(first)
    assert blocks.num_live == 2
    blocks.release(first)
    assert blocks.num_live == 2
    blocks.release(first)
    assert (blocks.num_live, blocks.num_cached, blocks.num_available) == (0, 2, 4)


def test_deepest_block_of_a_chain_is_evicted_first() -> None:
    blocks = BlockManager(3)
    chain = blocks.allocate(3)
    for block, key in zip(chain, (b"a", b"b", b"c"), strict=True):
        blocks.register(block, key)
    blocks.release(chain)
    blocks.allocate(1)
    assert blocks.match_prefix([b"a", b"b", b"c"]) == chain[:2]
    assert blocks.num_evictions == 1


def test_allocating_too_many_changes_nothing() -> None:
    blocks = BlockManager(2)
    with pytest.raises(NoFreeBlocksError, match="3 blocks were asked for, 2 of 2"):
        blocks.allocate(3)
    assert blocks.num_available == 2


def test_shrinking_refuses_held_blocks_and_forgets_cached_ones() -> None:
    blocks = BlockManager(2)
    held = blocks.allocate(2)
    blocks.register(held[1], b"k")
    with pytest.raises(NoFreeBlocksError, match="1 of the 1 blocks"):
        blocks.shrink(1)
    blocks.release([max(held)])
    blocks.shrink(1)
    assert blocks.num_blocks == 1
    assert blocks.match_prefix([b"k"]) == ([] if max(held) == held[1] else [held[1]])
    blocks.check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Random use against a plain model: which holder refers to which blocks, and what was registered."""

    holders = Bundle("holders")

    @initialize(size=st.integers(1, 8))
    def create(self, size: int) -> None:
        self.blocks = BlockManager(size)
        self.held: dict[int, list[int]] = {}
        self.next_holder = 0

    def _hold(self, blocks: list[int]) -> int:
        self.next_holder += 1
        self.held[self.next_holder] = blocks
        return self.next_holder

    @rule(target=holders, count=st.integers(0, 5))
    def allocate(self, count: int) -> int:
        if count > self.blocks.num_available:
            with pytest.raises(NoFreeBlocksError):
                self.blocks.allocate(count)
            return self._hold([])
        taken = self.blocks.allocate(count)
        assert not set(taken) & {block for blocks in self.held.values() for block in blocks}
        return self._hold(taken)

    @rule(holder=holders, key=st.integers(0, 5))
    def register(self, holder: int, key: int) -> None:
        for offset, block in enumerate(self.held.get(holder, [])):
            self.blocks.register(block, bytes([key, offset]))

    @rule(target=holders, key=st.integers(0, 5), length=st.integers(0, 5))
    def share(self, key: int, length: int) -> int:
        found = self.blocks.match_prefix([bytes([key, offset]) for offset in range(length)])
        before = self.blocks.num_available
        expected = before - self.blocks.num_cached_among(found)
        self.blocks.share(found)
        assert self.blocks.num_available == expected
        return self._hold(found)

    @rule(holder=consumes(holders))
    def release(self, holder: int) -> None:
        self.blocks.release(self.held.pop(holder))

    @rule(first=consumes(holders), second=consumes(holders))
    def release_two(self, first: int, second: int) -> None:
        both = self.held.pop(first) + self.held.pop(second)
        freed, before = self.blocks.num_freed_by(both), self.blocks.num_available
        self.blocks.release(both)
        assert self.blocks.num_available == before + freed

    @rule(spared=st.sets(st.integers(0, 9)))
    def drop_cached(self, spared: set[int]) -> None:
        free, live = self.blocks.num_available, {block for blocks in self.held.values() for block in blocks}
        kept = [block for block in self.blocks.findable() if block in live | spared]
        self.blocks.drop_cached(spared)
        assert self.blocks.findable() == kept
        assert self.blocks.num_available == free

    @rule(count=st.integers(0, 3))
    def grow(self, count: int) -> None:
        self.blocks.grow(count)

    @rule()
    def shrink(self) -> None:
        top = self.blocks.num_blocks - 1
        if top >= 1 and not any(top in blocks for blocks in self.held.values()):
            self.blocks.shrink(1)
            assert self.blocks.num_blocks == top

    @rule(data=st.data())
    def make_way(self, data: st.DataObject) -> None:
        """Live blocks beyond a smaller pool become others, with their holders and keys."""
        num_blocks = data.draw(st.integers(1, self.blocks.num_blocks))
        keys = [bytes([key, offset]) for key in range(6) for offset in range(5)]
        found = {key: block for key in keys for block in self.blocks.match_prefix([key])}
        live = {block for blocks in self.held.values() for block in blocks}
        if len(live) > num_blocks:
            with pytest.raises(NoFreeBlocksError):
                self.blocks.plan_shrink(num_blocks)
            return
        moves = self.blocks.plan_shrink(num_blocks)
        assert moves.keys() == {block for block in live if block >= num_blocks}
        assert not live & set(moves.values())
        self.blocks.relocate(moves)
        self.blocks.shrink(self.blocks.num_blocks - num_blocks)
        self.held = {holder: [moves.get(block, block) for block in held] for holder, held in self.held.items()}
        for key, block in found.items():
            if block in live:
                assert self.blocks.match_prefix([key]) == [moves.get(block, block)]
        occupied, findable = self.blocks.occupied(), self.blocks.findable()
        assert len(occupied) == self.blocks.num_live + self.blocks.num_cached
        assert sorted({block for key in keys for block in self.blocks.match_prefix([key])}) == findable
        assert set(findable) <= set(occupied)

    @invariant()
    def books_balance(self) -> None:
        self.blocks.check_integrity()
        assert self.blocks.num_live == len({block for blocks in self.held.values() for block in blocks})


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
