"""The disk tier beside a disk that refuses and a directory whose answers get lost. Files, tier and directory are real;
actors' calls are plain ones, so no cluster is needed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.directory_client import DirectoryClient
from kv.directory_service import DirectoryService
from kv.disk.settings import DiskSettings
from kv.disk.tier import DiskTier
from kv.dram_tier import DramTier
from kv.extents import ExtentInfo, file_name_of
from kv.node_disk import NodeDisk
from kv.policy.policy_file import PolicySpec
from kv.ray_failures import STORE_FAILURES
from kv.shards import new_extent_id
from kv.store_stats import DiskStats
from tests.kv.disk.extents_to_write import Extent, frozen, make_extent, mounted_disk, taken_bytes
from tests.local_directory import LocalShard

MIB = 1024 * 1024
EXTENT_BYTES = DiskTier.size_on_disk(make_extent().sizes)
FOR_EVER_S = 1e6


class Ref:
    """What is waited for like a reference of an object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self._value


class ForgetfulShard(LocalShard):
    """Does what it is asked; answers to `lost` methods come too late."""

    def __init__(self, policy: PolicySpec | None = None) -> None:
        self.now_s = 0.0
        self.lost: set[str] = set()
        super().__init__(lambda: DirectoryService(policy, 0, clock=lambda: self.now_s))

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)
        return _Lost(method) if name in self.lost else method


class _Lost:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        self._method.remote(*arguments)
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(TimeoutError())
        answer.exception()  # not all callers wait for it
        return answer


class Cell:
    """A store's disk tier. `limit` and sizes are in extents."""

    def __init__(self, folder: Path, limit: int, shard: ForgetfulShard, retry_s: float = 0.0) -> None:
        settings = DiskSettings(str(folder), limit * EXTENT_BYTES, retry_s=retry_s)
        self.folder = folder
        self.shard = shard
        self.client = DirectoryClient([shard])
        self.dram = DramTier("s", self.client, 64 * MIB, self._demote)
        self.tier = DiskTier.open(folder, settings.limit_bytes, remove_leftovers=True)
        self.disk = NodeDisk("s", self.client, self.tier, self.dram, settings)

    @classmethod
    async def start(cls, folder: Path, limit: int, shard: ForgetfulShard, retry_s: float = 0.0) -> Cell:
        cell = cls(folder, limit, shard, retry_s)
        await cell.client.enroll("s")
        return cell

    async def _demote(self, info: ExtentInfo, refs: Any) -> None:
        await self.disk.demote(info, refs)

    async def store(self, seed: int) -> str:
        """A chain of its own for each seed. It is on disk on return, or was refused."""
        extent = make_extent(seed=seed)
        info = info_of(extent)
        assert self.dram.ledger.reserve(info.num_bytes)
        self.dram.ledger.add_extent(info, [Ref(buffer) for buffer in extent.buffers])
        self.disk.stored(info)
        assert await self.disk.flush(30.0)
        self.dram.drop([info.extent_id])
        return info.extent_id

    async def keep_house(self) -> None:
        """As the store does it."""
        try:
            upkeep = await self.client.keep_house("s")
            await self.disk.drop(upkeep.gone["disk"])
            if upkeep.new_ids:
                await self.disk.relist(upkeep)
                self.client.has_relisted(upkeep)
            await self.disk.trim()
            await self.disk.compare(upkeep)
        except STORE_FAILURES:
            self.disk.doubt()

    @property
    def stats(self) -> DiskStats:
        return self.disk.stats()

    @property
    def refusals(self) -> dict[str, int]:
        return self.stats.refusals

    def files(self) -> set[str]:
        return {f"s/{path.stem}" for path in self.folder.glob("??/*.kv")}

    def listed(self) -> set[str]:
        return set(self.shard.service.extent_ids_of("s", "disk"))

    def assert_in_order(self) -> None:
        assert self.listed() == self.files()
        assert all(self.disk.has(extent_id) for extent_id in self.files())
        assert self.stats.num_extents == len(self.files())
        assert self.stats.used_bytes == taken_bytes(self.folder) <= self.stats.limit_bytes


def info_of(extent: Extent) -> ExtentInfo:
    ranges = [header.range for header in extent.headers]
    num_bytes = sum(extent.sizes)
    lanes = tuple(part.lanes for part in ranges)
    extent_id = new_extent_id("s", extent.keys[0])
    return ExtentInfo(extent_id, "s", extent.keys, ranges[0].first_block, lanes, num_bytes, extent.parent)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_a_full_tier_on_a_disk_that_refuses_to_remove_keeps_what_it_has(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 3, ForgetfulShard(), retry_s=FOR_EVER_S)
        stored = {await cell.store(seed) for seed in range(3)}
        with frozen(folder):
            for seed in range(3, 8):
                await cell.store(seed)
                assert cell.listed() == stored == cell.files()
                assert all(cell.disk.has(extent_id) for extent_id in stored)
            assert cell.refusals == {"disk_remove": 1, "disk_paused": 5}
            await cell.keep_house()
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_disk_that_lets_go_again_is_used_again(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 3, ForgetfulShard())
        stored = {await cell.store(seed) for seed in range(3)}
        with frozen(folder):
            for seed in range(3, 6):
                await cell.store(seed)
                assert cell.listed() == stored
            assert cell.refusals["disk_remove"] == 3
        new = await cell.store(6)
        assert new in cell.listed()
        assert len(stored & cell.listed()) == 2
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_what_nobody_is_to_read_goes_when_the_disk_lets_go_of_it(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 3, ForgetfulShard())
        extent_id = await cell.store(0)
        with frozen(folder):
            cell.shard.service.drop_extent(extent_id)
            await cell.disk.drop([extent_id])
            await cell.keep_house()
            assert not cell.disk.has(extent_id)
            assert (cell.listed(), cell.files()) == (set(), {extent_id})
            assert cell.stats.used_bytes == EXTENT_BYTES
        await cell.keep_house()
        cell.assert_in_order()
        assert cell.files() == set()
        await cell.disk.close()

    asyncio.run(work())


async def rounds(cell: Cell, count: int = 3) -> None:
    for _ in range(count):
        await cell.keep_house()


def test_extents_are_listed_or_gone_after_answers_about_room_were_lost(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard())
        for seed in range(6):
            await cell.store(seed)
        cell.shard.lost = {"evict"}
        for seed in range(6, 9):
            await cell.store(seed)
        assert (len(cell.listed()), len(cell.files())) == (3, 6)
        cell.shard.lost = set()
        await rounds(cell)
        cell.assert_in_order()
        new = {await cell.store(seed) for seed in range(9, 15)}
        assert cell.listed() == new
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_lowered_limit_is_kept_after_the_answer_was_lost(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard())
        for seed in range(6):
            await cell.store(seed)
        cell.tier.set_limit(2 * EXTENT_BYTES)
        cell.shard.lost = {"shrink"}
        await cell.keep_house()
        assert len(cell.files()) == 6
        cell.shard.lost = set()
        await rounds(cell)
        cell.assert_in_order()
        assert len(cell.files()) == 2
        await cell.disk.close()

    asyncio.run(work())


def test_what_expired_goes_after_the_answer_was_lost(folder: Path) -> None:
    async def work() -> None:
        shard = ForgetfulShard(PolicySpec(default_ttl_s=10.0))
        cell = await Cell.start(folder, 6, shard)
        old = await cell.store(0)
        shard.now_s = 9.0
        young = await cell.store(1)
        shard.now_s = 15.0
        shard.lost = {"keep_house"}
        await cell.keep_house()
        assert (cell.listed(), cell.files()) == ({young}, {old, young})
        shard.lost = set()
        await rounds(cell)
        assert cell.files() == {young}
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_written_extent_that_the_directory_did_not_hear_of_is_listed_later(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard())
        await rounds(cell)
        cell.shard.is_dead = True
        extent_id = await cell.store(0)
        cell.shard.is_dead = False
        assert cell.listed() == set()
        await cell.keep_house()
        assert cell.listed() == {extent_id}
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_directory_that_forgot_the_store_is_told_again(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard())
        stored = {await cell.store(seed) for seed in range(3)}
        cell.shard.service.drop_store("s")
        cell.disk.doubt()
        await rounds(cell)
        assert cell.listed() == stored
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_directory_that_begins_anew_between_two_questions_costs_nothing(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard())
        stored = {await cell.store(seed) for seed in range(3)}
        await rounds(cell)
        upkeep = await cell.client.keep_house("s")
        cell.shard.restart()
        cell.disk.doubt()
        await cell.disk.compare(upkeep)
        await rounds(cell)
        assert cell.listed() == stored
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


@pytest.mark.parametrize("fault", ["it crashes", "its answer is lost"])
def test_all_that_an_earlier_run_left_is_listed_though_the_directory_fails_meanwhile(folder: Path, fault: str) -> None:
    class Failing(ForgetfulShard):
        """At the second batch."""

        def __getattr__(self, name: str) -> Any:
            if name == "adopt" and self.calls.count("adopt") == 1:
                self.is_dead, self.lost = fault == "it crashes", {"adopt"}
                asyncio.get_running_loop().call_soon(self.recover)
            return super().__getattr__(name)

        def recover(self) -> None:
            self.lost = set()
            if self.is_dead:
                self.restart()

    async def work() -> None:
        tier = DiskTier.open(folder, 400 * EXTENT_BYTES, remove_leftovers=True)
        for seed in range(300):
            extent = make_extent(seed=seed)
            assert tier.reserve(EXTENT_BYTES)
            tier.write(file_name_of(info_of(extent).extent_id), extent.parent, extent.buffers)
        tier.close()
        cell = await Cell.start(folder, 400, Failing())
        await cell.store(1000)  # only when all is listed
        await rounds(cell)
        assert len(cell.listed()) == 301
        cell.assert_in_order()
        await cell.disk.close()

    asyncio.run(work())


def test_a_file_system_smaller_than_the_limit_takes_what_is_new(tmp_path: Path) -> None:
    async def work(disk: Path) -> None:
        cell = await Cell.start(disk, 1000, ForgetfulShard(), retry_s=FOR_EVER_S)
        stored = [await cell.store(seed) for seed in range(60)]
        assert cell.refusals == {"disk_full": 1}
        assert stored[-1] in cell.listed()
        assert stored[0] not in cell.listed()
        cell.assert_in_order()
        assert cell.stats.limit_bytes <= 512 * 1024
        await cell.disk.close()

    with mounted_disk(tmp_path / "disk", "size=512k") as disk:
        asyncio.run(work(disk))


def test_a_tier_grows_again_where_there_is_room_again(tmp_path: Path) -> None:
    async def work(disk: Path) -> None:
        cell = await Cell.start(disk / "kv", 100, ForgetfulShard(), retry_s=0.0)
        kept = [await cell.store(seed) for seed in range(3)]
        with suppress(OSError), (disk / "of others").open("wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
        new = await cell.store(3)
        assert cell.listed() <= {*kept, new}
        assert kept[0] not in cell.listed()
        assert cell.refusals["disk_full"] >= 1
        (disk / "of others").unlink()
        before = cell.listed()
        more = {await cell.store(seed) for seed in range(4, 14)}
        assert cell.listed() == before | more
        assert cell.stats.limit_bytes == 100 * EXTENT_BYTES
        cell.assert_in_order()
        await cell.disk.close()

    with mounted_disk(tmp_path / "disk", "size=512k") as disk:
        asyncio.run(work(disk))


def test_a_file_in_the_place_of_a_sub_folder_stops_no_other_write(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 100, ForgetfulShard(), retry_s=FOR_EVER_S)
        for number in range(128):
            (folder / f"{number:02x}").touch()
        stored = {await cell.store(seed) for seed in range(30)}
        written = {extent_id for extent_id in stored if file_name_of(extent_id)[0] in "89abcdef"}
        assert cell.listed() == cell.files() == written
        assert cell.refusals.get("disk_blocked", 0) == 30 - len(written)
        await cell.disk.close()

    asyncio.run(work())


def test_a_lost_folder_is_given_up(folder: Path) -> None:
    async def work() -> None:
        cell = await Cell.start(folder, 6, ForgetfulShard(), retry_s=FOR_EVER_S)
        for seed in range(3):
            await cell.store(seed)
        shutil.rmtree(folder)
        await cell.store(3)
        await cell.store(4)
        assert cell.refusals == {"disk_lost": 1, "disk_paused": 1}
        assert await cell.disk.is_lost()
        await cell.disk.give_up()
        assert (cell.listed(), cell.stats.num_extents, folder.exists()) == (set(), 0, False)

    asyncio.run(work())


METHODS = ("adopt", "evict", "shrink", "keep_house", "extent_ids_of")
STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 12)),
    st.tuples(st.just("lose"), st.sets(st.sampled_from(METHODS))),
    st.tuples(st.just("limit"), st.integers(0, 6)),
    st.tuples(st.sampled_from(["keep house", "begin anew", "die", "pass time", "forget one"]), st.none()),
)


@settings(max_examples=30)
@given(st.lists(STEPS, max_size=25))
def test_whatever_is_lost_what_is_on_disk_is_listed_in_the_end(steps: list[tuple[str, Any]]) -> None:
    async def work(folder: Path) -> None:
        shard = ForgetfulShard(PolicySpec(default_ttl_s=100.0))
        cell = await Cell.start(folder, 4, shard)
        for what, value in steps:
            if what == "store":
                await cell.store(value)
            elif what == "lose":
                shard.lost = value
            elif what == "limit":
                cell.tier.set_limit(value * EXTENT_BYTES)
            elif what == "keep house":
                await cell.keep_house()
            elif what == "begin anew":
                shard.restart()
            elif what == "die":
                shard.is_dead = True
            elif what == "pass time":
                shard.now_s += 60.0
            else:
                for extent_id in list(cell.listed())[:1]:
                    shard.service.drop_extent(extent_id)
                    cell.disk.doubt()
            assert taken_bytes(folder) <= cell.stats.used_bytes
        shard.lost, shard.is_dead = set(), False
        cell.disk.doubt()
        await rounds(cell, 6)
        cell.assert_in_order()
        await cell.disk.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(work(Path(folder)))


class _Late:
    """A reference whose object comes when `comes` is set."""

    def __init__(self, value: Any, comes: asyncio.Event) -> None:
        self._value, self._comes = value, comes

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._comes.wait().__await__()
        return self._value


def put(cell: Cell, seed: int, comes: asyncio.Event) -> ExtentInfo:
    """An extent in DRAM that is to be written."""
    extent = make_extent(seed=seed)
    info = info_of(extent)
    put_as(cell, info, extent, comes)
    return info


def put_as(cell: Cell, info: ExtentInfo, extent: Extent, comes: asyncio.Event) -> None:
    assert cell.dram.ledger.reserve(info.num_bytes)
    cell.dram.ledger.add_extent(info, [_Late(buffer, comes) for buffer in extent.buffers])
    cell.disk.stored(info)


def test_an_extent_that_is_read_while_it_leaves_dram_is_written_once(tmp_path: Path) -> None:
    """By a reader that came too late to keep it. Writing goes on after that."""

    async def work() -> None:
        cell = await Cell.start(tmp_path / "kv", 20, ForgetfulShard())
        await cell.store(0)
        other_comes, comes, there = asyncio.Event(), asyncio.Event(), asyncio.Event()
        other = put(cell, 1, other_comes)
        while cell.disk.stats().num_queued_extents:  # until it is being written
            await asyncio.sleep(0)
        info = put(cell, 2, comes)
        leaving = asyncio.create_task(cell._demote(info, cell.dram.ledger.refs(info.extent_id)))
        await asyncio.sleep(0)
        cell.disk.used(info.extent_id)
        other_comes.set()
        assert await cell.disk.flush(30.0)
        comes.set()
        await leaving
        there.set()
        later = put(cell, 3, there)
        assert await cell.disk.flush(30.0)
        for written in (other, info, later):
            assert cell.disk.has(written.extent_id)
        assert cell.tier.used_bytes == taken_bytes(cell.folder) == 4 * EXTENT_BYTES

    asyncio.run(work())


def test_an_extent_that_cannot_be_written_for_a_reason_unforeseen_stops_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its file is there, and nobody lists it. What was reserved for it is free again, and the disk is used on."""

    async def work() -> None:
        cell = await Cell.start(tmp_path / "kv", 20, ForgetfulShard())
        there = asyncio.Event()
        there.set()
        extent = make_extent(seed=1)
        info = info_of(extent)
        assert cell.tier.reserve(EXTENT_BYTES)
        cell.tier.write(file_name_of(info.extent_id), info.parent, extent.buffers)
        before = cell.tier.used_bytes
        put_as(cell, info, extent, there)
        assert await cell.disk.flush(30.0)
        assert cell.tier.used_bytes == before
        assert dict(cell.disk.stats().refusals) == {"disk_defect": 1}
        assert f"{info.extent_id} could not be written" in caplog.text
        later = put(cell, 2, there)
        assert await cell.disk.flush(30.0)
        assert cell.disk.has(later.extent_id)

    asyncio.run(work())
