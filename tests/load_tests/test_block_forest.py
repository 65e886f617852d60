from __future__ import annotations

from collections import Counter

import pytest

from kv.directory import Directory
from load_tests.block_forest import BlockForest, Chain


def chains(num_blocks: int = 20_000, seed: int = 1) -> list[Chain]:
    return list(BlockForest(seed).chains(num_blocks))


@pytest.mark.parametrize("num_blocks", [1, 249, 20_000])
def test_chains_bring_exactly_so_many_blocks(num_blocks: int) -> None:
    brought = [key for chain in chains(num_blocks) for info in chain.extents for key in info.keys]
    assert len(brought) == len(set(brought)) == num_blocks


def test_extents_are_what_a_store_would_make_of_their_chain() -> None:
    *whole, _ = chains()
    seen: set[bytes] = set()
    for chain in whole:
        assert len(chain.keys) == 250
        new = [key for key in chain.keys if key not in seen]
        seen.update(new)
        assert [key for info in chain.extents for key in info.keys] == new
        for info in chain.extents:
            first = chain.keys.index(info.keys[0])
            assert info.first_block == first
            assert chain.keys[first : first + len(info.keys)] == info.keys
            assert info.parent == (chain.keys[first - 1] if first else None)
        assert all(10 <= len(info.keys) <= 30 for info in chain.extents[:-1])


def test_roots_are_shared_by_zipf() -> None:
    roots = Counter(chain.keys[0] for chain in chains(200_000))
    uses = [count for _, count in roots.most_common()]
    assert len(uses) == 20
    harmonic = sum(1 / rank for rank in range(1, 21))
    assert uses[0] / sum(uses) == pytest.approx(1 / harmonic, rel=0.2)
    assert uses[1] / uses[0] == pytest.approx(1 / 2, rel=0.3)


def test_a_directory_takes_them_all_and_finds_the_root_of_a_new_prompt() -> None:
    directory, forest = Directory(), BlockForest(3)
    for now_s, chain in enumerate(forest.chains(20_000)):
        ticket = directory.begin_put(chain.keys, float(now_s), 60.0)
        assert ticket.put_id is not None
        assert directory.commit_put(ticket.put_id, chain.extents, float(now_s))
        assert directory.match_blocks(chain.keys) == len(chain.keys)
    assert directory.num_blocks == 20_000
    keys, root_blocks = forest.new_prompt()
    assert 50 <= directory.match_blocks(keys) == root_blocks <= 150


def test_the_same_seed_gives_the_same_chains() -> None:
    assert chains(2000) == chains(2000)
    assert chains(2000) != chains(2000, seed=2)
