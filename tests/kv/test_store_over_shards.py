"""A node's store over a directory in two shards, of which one crashes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from kv.directory_actor import DirectoryActor
from kv.directory_client import DirectoryClient
from kv.disk.settings import DiskSettings
from kv.extents import PullReceipt
from kv.node_store import NodeStore
from kv.part_range import MIN_PART_LIMIT_BYTES
from kv.shards import shard_of_chain
from tests.store_cell import MIB, Setup, chain, crash, eventually, get, pull, stats_of, visible_blocks

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

NAMES = "abcdefghij"
BLOCKS = 12


def summed_stats(shards: list[Any]) -> dict[str, Any]:
    return asyncio.run(DirectoryClient(shards).stats())


def test_a_crash_of_one_shard_hides_its_chains_until_it_is_told_of_them(
    setup: Setup, worker: Any, tmp_path: Path
) -> None:
    shards = [setup.directory, setup.start(cast(Any, DirectoryActor).options(max_restarts=-1), (None, 1))]
    store = setup.start(
        NodeStore,
        ("s", shards, 64 * MIB),
        disk=DiskSettings(str(tmp_path), 64 * MIB),
        max_part_bytes=MIN_PART_LIMIT_BYTES,
    )
    by_shard: dict[int, list[list[bytes]]] = {0: [], 1: []}
    for name in NAMES:
        keys = chain(name, BLOCKS)
        by_shard[shard_of_chain(keys, 2)].append(keys)
        assert pull(store, worker, keys) == PullReceipt(BLOCKS, None)
    assert by_shard[0]
    assert by_shard[1]
    assert get(store.flush.remote(30.0))
    for number, chains in by_shard.items():
        assert [visible_blocks(shards[number], keys) for keys in chains] == [BLOCKS] * len(chains)
    assert summed_stats(shards)["num_blocks"] == BLOCKS * len(NAMES)

    crash(shards[1])
    for keys in by_shard[0]:
        assert visible_blocks(shards[0], keys) == BLOCKS
    eventually(lambda: all(visible_blocks(shards[1], keys) == BLOCKS for keys in by_shard[1]))
    # Nothing was told, or kept, twice, in either tier.
    num_bytes = stats_of(store).used_bytes
    eventually(lambda: summed_stats(shards)["bytes_by_store"]["s"].keys() == {"dram", "disk"})
    assert summed_stats(shards)["bytes_by_store"]["s"]["dram"] == num_bytes
    assert (summed_stats(shards)["num_leases"], summed_stats(shards)["num_puts"]) == (0, 0)

    # Room is made by both: with that of one chain left, only the last one stays.
    get(store.set_limits.remote(num_bytes // len(NAMES), None))
    assert stats_of(store).num_extents == 1
    assert get(shards[0].stats.remote())["trimmed"]["dram"] + get(shards[1].stats.remote())["trimmed"]["dram"] == 9
