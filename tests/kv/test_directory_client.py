"""The directory's actor through its client, on a real Ray cluster."""

from __future__ import annotations

import asyncio

import pytest

from kv.directory_client import DirectoryClient
from kv.extents import Copy, ExtentInfo
from kv.part_range import LaneRange
from kv.shards import root_digits
from tests.store_cell import Setup, chain, eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def extent(name: str, keys: list[bytes], first: int, stop: int) -> ExtentInfo:
    parent = keys[first - 1] if first else None
    lanes = (LaneRange(0, 4, 0, 2),)
    return ExtentInfo(extent_id(name, keys), "s", tuple(keys[first:stop]), first, lanes, 10, parent)


def extent_id(name: str, keys: list[bytes]) -> str:
    return f"s/{name:0>24}{root_digits(keys[0])}"


async def put(directory: DirectoryClient, keys: list[bytes], *extents: ExtentInfo) -> None:
    ticket = await directory.begin_put(keys, 60.0)
    assert ticket.put_id is not None
    assert await directory.commit_put(ticket.put_id, extents)


def test_what_is_put_is_found_leased_and_evicted(setup: Setup) -> None:
    keys = chain("a", 5)

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        await put(directory, keys, extent("1", keys, 0, 3), extent("2", keys, 3, 5))
        assert await directory.match_blocks(keys) == 5
        found = await directory.lookup(keys[:4], 60.0, skip_blocks=1)
        assert (found.num_blocks, found.first_block) == (4, 1)
        assert [(piece.extent_id, piece.first, piece.count) for piece in found.slices] == [
            (extent_id("1", keys), 1, 2),
            (extent_id("2", keys), 0, 1),
        ]
        assert found.slices[1].parts == extent("2", keys, 3, 5).parts
        assert found.lease_id is not None
        assert await directory.renew([found.lease_id, 1], 60.0) == [found.lease_id]
        assert await directory.evict("s", "dram", 10) == []
        assert await directory.add_copy(extent_id("2", keys), "disk", 16)
        directory.release(found.lease_id)
        directory.send_released()
        assert await directory.evict("s", "dram", 10) == [extent_id("2", keys)]
        assert await directory.extent_ids_of("s", "disk") == [extent_id("2", keys)]
        directory.drop_extent(extent_id("2", keys))
        assert await directory.adopt([Copy(extent("3", keys, 2, 5), "disk", 16)]) == [extent_id("3", keys)]
        assert await directory.adopt([Copy(extent("4", keys, 3, 5), "disk", 16)]) == []
        assert (await directory.keep_house("s")).gone == {"dram": [], "disk": []}
        directory.drop_store("s")
        assert await directory.match_blocks(keys) == 0

    asyncio.run(run())


def test_a_lease_that_has_ended_goes_with_the_next_lookup(setup: Setup) -> None:
    keys = chain("a", 2)

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        await put(directory, keys, extent("1", keys, 0, 2))
        for _ in range(5):
            found = await directory.lookup(keys, 60.0)
            assert found.lease_id is not None
            directory.release(found.lease_id)
        # The last one has not been told yet, or just has been.
        assert setup.directory_stats()["num_leases"] <= 1
        directory.send_released()
        directory.send_released()

    asyncio.run(run())
    assert setup.directory_stats()["num_leases"] == 0


def test_without_another_lookup_a_lease_ends_by_itself(setup: Setup) -> None:
    keys = chain("a", 2)

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        await put(directory, keys, extent("1", keys, 0, 2))
        found = await directory.lookup(keys, 60.0)
        assert found.lease_id is not None
        directory.release(found.lease_id)
        await asyncio.to_thread(eventually, lambda: setup.directory_stats()["num_leases"] == 0)

    asyncio.run(run())


def test_who_waits_for_anothers_put_keeps_nobody_from_ending_it(setup: Setup) -> None:
    keys = chain("a", 2)

    async def run() -> None:
        directory = DirectoryClient([setup.directory])
        ticket = await directory.begin_put(keys, 60.0)
        assert ticket.put_id is not None
        assert not await directory.settle(keys, 0.01)
        waiting = [asyncio.create_task(directory.settle(keys[:stop], 60.0)) for stop in (1, 2)]
        assert await directory.match_blocks(keys) == 0
        assert await directory.commit_put(ticket.put_id, [extent("1", keys, 0, 2)])
        assert await asyncio.gather(*waiting) == [True, True]
        assert await directory.settle(keys, 0.0)

    asyncio.run(run())
