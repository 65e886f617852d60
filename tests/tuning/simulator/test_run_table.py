"""Tiers and device pools against the same with every block as an entry of its own."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.policy.interface import EvictionPolicy
from kv.policy.policy_file import Eviction, PolicySpec, make_policy
from tuning.simulator.device_pool import DevicePool
from tuning.simulator.run_table import RunTable, without
from tuning.simulator.tier_blocks import TierBlocks

DEPTH = 7
NUM_IDS = 2 ** (DEPTH + 1)


def chain_of(path: Sequence[int]) -> list[int]:
    """Ids of the nodes on a way down a binary tree, numbered level by level: they rise, and stand for prefixes."""
    node, chain = 0, []
    for turn in path:
        node = 2 * node + 1 + turn
        chain.append(node)
    return chain


LEAVES = [chain_of(path) for path in itertools.product((0, 1), repeat=DEPTH)]


def blocks_of(table: RunTable) -> set[int]:
    """All that is there: whatever walks along all prompts come by."""
    found: set[int] = set()
    for chain in LEAVES:
        start = 0
        while start < DEPTH:
            end = table.matched(chain, start, DEPTH)
            found.update(chain[start:end])
            start = table.missing(chain, end, DEPTH) if end < DEPTH else DEPTH
    return found


chains = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(chain_of)


class BlockByBlock:
    """A tier whose policy has an entry for each block."""

    def __init__(self, capacity: int, policy: EvictionPolicy, front_first: bool) -> None:
        self.capacity = capacity
        self.policy = policy
        self.blocks: set[int] = set()
        self.front_first = front_first

    def use(self, chain: Sequence[int], now_s: float) -> None:
        for block in chain if self.front_first else reversed(chain):
            if block in self.blocks:
                self.policy.use(block, now_s)

    def put(self, chain: Sequence[int], now_s: float) -> None:
        if self.front_first:
            for block in chain:
                if block in self.blocks:
                    self.policy.use(block, now_s)
                else:
                    self.insert(block, set(), now_s)
            return
        held = self.blocks & set(chain)
        room = self.capacity - len(held)
        for block in [block for block in chain if block not in held][: max(0, room)]:
            self.insert(block, held, now_s)
            held.add(block)
        self.use(chain, now_s)

    def insert(self, block: int, held: set[int], now_s: float) -> None:
        if len(self.blocks) == self.capacity:
            self.remove(next(other for other in self.policy.victims(now_s) if other not in held))
        self.blocks.add(block)
        self.policy.insert(block, 0, now_s)

    def expire(self, now_s: float) -> None:
        for block in self.policy.expired(now_s, NUM_IDS):
            self.remove(block)

    def remove(self, block: int) -> None:
        self.policy.remove(block)
        self.blocks.remove(block)


@pytest.mark.parametrize("front_first", [False, True])
@pytest.mark.parametrize(("eviction", "ttl_s"), [("lru", None), ("lru", 3.0), ("lfu", None), ("lfu", 3.0)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_runs_keep_what_single_blocks_would(
    eviction: Eviction, ttl_s: float | None, front_first: bool, data: st.DataObject
) -> None:
    if eviction == "lfu" and front_first:
        return  # a plain cache under LFU throws out what it has just taken in: no such corner is promised
    capacity = data.draw(st.integers(1, 12))
    spec = PolicySpec(eviction, ttl_s)
    tier = TierBlocks(capacity, make_policy(spec), counts_uses=eviction == "lfu", front_first=front_first)
    single = BlockByBlock(capacity, make_policy(spec), front_first)
    now_s = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        now_s += data.draw(st.sampled_from([0.0, 1.0, 2.0]))
        chain = data.draw(chains)
        tier.expire(now_s)
        single.expire(now_s)
        stop = tier.matched(chain, 0, len(chain))
        assert stop == next((i for i, block in enumerate(chain) if block not in single.blocks), len(chain))
        tier.use(chain, stop, now_s)
        single.use(chain[:stop], now_s)
        if data.draw(st.booleans()):
            tier.put(chain, len(chain), now_s)
            single.put(chain, now_s)
        assert blocks_of(tier) == single.blocks
        assert tier.used_blocks == len(single.blocks) <= capacity
        assert tier.inserted_blocks - tier.evicted_blocks - tier.expired_blocks == tier.used_blocks


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_walk_from_anywhere_ends_where_blocks_do(data: st.DataObject) -> None:
    tier = TierBlocks(12, make_policy(PolicySpec()))
    here: set[int] = set()
    for chain in data.draw(st.lists(chains, max_size=6)):
        start = data.draw(st.integers(0, len(chain) - 1))
        stop = data.draw(st.integers(start + 1, len(chain)))
        tier.put_missing(chain, start, stop, 0.0)
        here |= set(chain[start:stop])
        if len(here) > 12:
            here = blocks_of(tier)
    assert blocks_of(tier) == here
    chain = data.draw(chains)
    start = data.draw(st.integers(0, len(chain) - 1))
    rest = range(start, len(chain))
    assert tier.matched(chain, start, len(chain)) == next((i for i in rest if chain[i] not in here), len(chain))
    if chain[start] not in here:
        assert tier.missing(chain, start, len(chain)) == next((i for i in rest if chain[i] in here), len(chain))


def test_stretches_without_busy_blocks() -> None:
    chain = [3, 5, 6, 9, 12, 14]
    assert without(chain, 1, 5, {3, 14}) == [(1, 5)]
    assert without(chain, 0, 6, {6, 14}) == [(0, 2), (3, 5)]
    assert without(chain, 0, 2, {3, 5}) == without(chain, 2, 2, set()) == []


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_device_pool_is_an_lru_of_single_blocks(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(4, 30))
    pool = DevicePool(capacity)
    holders: dict[int, int] = {}
    cached: OrderedDict[int, None] = OrderedDict()
    private = 0
    running: list[tuple[list[int], int]] = []

    for _ in range(data.draw(st.integers(1, 30))):
        if running and data.draw(st.booleans()):
            chain, num_private = running.pop(data.draw(st.integers(0, len(running) - 1)))
            pool.release(chain, len(chain), num_private)
            private -= num_private
            for block in reversed(chain):
                holders[block] -= 1
                if not holders[block]:
                    del holders[block]
                    cached[block] = None
        else:
            chain = data.draw(chains)
            num_private = data.draw(st.integers(0, 3))
            matched = pool.match(chain, len(chain))
            known = set(holders) | set(cached)
            assert matched == next((i for i, block in enumerate(chain) if block not in known), len(chain))
            held = set(holders) | set(chain[:matched])
            fits = len(held) + private + len(chain) - matched + num_private <= capacity
            assert pool.take(chain, matched, len(chain) + num_private) == fits
            if fits:
                private += len(chain) - matched + num_private
                for block in chain[:matched]:
                    cached.pop(block, None)
                    holders[block] = holders.get(block, 0) + 1
                while len(holders) + private + len(cached) > capacity:
                    cached.popitem(last=False)
                pool.keep(chain, matched, len(chain))
                private -= len(chain) - matched
                for block in chain[matched:]:
                    cached.pop(block, None)
                    holders[block] = holders.get(block, 0) + 1
                running.append((chain, num_private))
        assert blocks_of(pool) == set(holders) | set(cached)
        assert (pool.live_blocks, pool.private_blocks, pool.cached_blocks) == (len(holders), private, len(cached))
        assert pool.free_blocks == capacity - len(holders) - private - len(cached) >= 0
