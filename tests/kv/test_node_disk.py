"""The disk tier in a running store: written behind, read back, found again, and never trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from kv.disk.extent_file import write_extent
from kv.disk.settings import DiskSettings
from kv.policy.admission import DiskAdmission
from kv.policy.policy_file import PolicySpec
from kv.store_stats import DiskStats
from tests.kv.disk.extents_to_write import frozen, make_extent
from tests.store_cell import MIB, Setup, chain, crash, eventually, fetch, get, pull, stats_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

# 12 blocks are one extent of 768 KiB; a DRAM tier of 1 MiB holds one of them.
ONE_EXTENT = MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def start(setup: Setup, folder: Path, dram_bytes: int = 64 * MIB, disk_bytes: int = 64 * MIB, **settings: Any) -> Any:
    store = setup.store(dram_bytes, disk=DiskSettings(str(folder), disk_bytes, **settings))
    # What leaves DRAM before the folder is listed is not written.
    eventually(lambda: (disk := stats_of(store).disk) is None or disk.is_scanned)
    return store


def disk_of(store: Any) -> DiskStats:
    disk = stats_of(store).disk
    assert disk is not None
    return disk


def flush(store: Any) -> None:
    assert get(store.flush.remote(30.0))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.kv"))


def restart(setup: Setup, store: Any, folder: Path, **options: Any) -> Any:
    get(store.close.remote(30.0))
    ray.kill(store)
    again = start(setup, folder, **options)
    eventually(lambda: disk_of(again).is_scanned)
    return again


def assert_all_there(setup: Setup, store: Any, keys: list[bytes]) -> None:
    found = setup.lookup(keys)
    assert found.num_blocks == len(keys)
    assert fetch(setup, {"s": store}, keys, found) == (len(keys), [])


def test_what_is_stored_is_written_soon_and_found_after_a_restart(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 30)
    pull(store, worker, keys)
    flush(store)
    written = disk_of(store)
    assert (written.num_extents, written.num_written_extents, written.num_queued_extents) == (3, 3, 0)
    assert sum(path.stat().st_size for path in files_in(folder)) <= written.used_bytes == written.written_bytes

    again = restart(setup, store, folder)
    assert (disk_of(again).num_found_extents, stats_of(again).num_extents) == (3, 0)
    found = setup.lookup(keys)
    assert (found.num_blocks, {piece.tier for piece in found.slices}) == (30, {"disk"})
    assert setup.directory_stats()["hit_blocks_disk"] == 30
    assert fetch(setup, {"s": again}, keys, found) == (30, [])
    # Reading brings it to DRAM; readers do not wait for that.
    eventually(lambda: disk_of(again).num_promoted_extents == 3)
    assert {piece.tier for piece in setup.lookup(keys).slices} == {"dram"}


def test_what_has_to_leave_dram_is_on_disk(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder, ONE_EXTENT)
    chains = [chain(name, 12) for name in "abcd"]
    for keys in chains:
        pull(store, worker, keys)
    assert stats_of(store).num_extents == 1
    assert stats_of(store).used_bytes <= ONE_EXTENT
    for keys in chains:
        assert_all_there(setup, store, keys)
    assert stats_of(store).used_bytes <= ONE_EXTENT


def test_a_read_that_the_directory_does_not_hear_of_leaves_nothing_in_dram(
    setup: Setup, worker: Any, folder: Path
) -> None:
    store = start(setup, folder)
    keys = chain("a", 12)
    pull(store, worker, keys)
    flush(store)
    get(store.set_limits.remote(0, None))
    get(store.set_limits.remote(64 * MIB, None))
    part_ids = [part.part_id for piece in setup.lookup(keys).slices for part in piece.parts]
    ray.kill(setup.directory)
    assert all(ref is not None for ref in get(store.get_parts.remote(part_ids)))
    eventually(lambda: disk_of(store).num_read_extents + sum(disk_of(store).refusals.values()) == 1)
    assert (stats_of(store).num_extents, stats_of(store).used_bytes) == (0, 0)


def test_a_full_dram_tier_under_lease_does_not_stop_a_reader_of_the_disk(
    setup: Setup, worker: Any, folder: Path
) -> None:
    store = start(setup, folder, ONE_EXTENT)
    a, b = chain("a", 12), chain("b", 12)
    pull(store, worker, a)
    pull(store, worker, b)
    setup.lookup(b)  # leased, and all that DRAM has room for
    assert_all_there(setup, store, a)
    eventually(lambda: disk_of(store).num_read_extents == 1)
    assert disk_of(store).num_promoted_extents == 0
    assert stats_of(store).used_bytes <= ONE_EXTENT


def test_on_reuse_writes_what_was_read(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder, admission=DiskAdmission.ON_REUSE)
    a, b = chain("a", 12), chain("b", 12)
    pull(store, worker, a)
    pull(store, worker, b)
    assert_all_there(setup, store, a)
    flush(store)
    assert disk_of(store).num_written_extents == 1
    again = restart(setup, store, folder)
    assert [setup.visible(keys) for keys in (a, b)] == [12, 0]
    assert_all_there(setup, again, a)


def test_the_disk_never_takes_more_than_its_limit(setup: Setup, worker: Any, folder: Path) -> None:
    limit_bytes = 2 * MIB  # two extents
    store = start(setup, folder, disk_bytes=limit_bytes)
    for name in "abcde":
        pull(store, worker, chain(name, 12))
        flush(store)
        assert disk_of(store).used_bytes <= limit_bytes
        assert sum(path.stat().st_size for path in files_in(folder)) <= limit_bytes
    assert setup.directory_stats()["evicted"]["disk"] == 3

    # Also over what an earlier run with a higher limit left; the oldest goes.
    again = restart(setup, store, folder, disk_bytes=MIB)
    eventually(lambda: disk_of(again).num_extents == 1)
    assert disk_of(again).used_bytes <= MIB
    assert [setup.visible(chain(name, 12)) for name in "de"] == [0, 12]


@pytest.mark.parametrize("damage", ["a bit", "half of it", "all of it", "the file", "its parts"])
def test_a_damaged_file_is_a_miss_and_goes(damage: str, setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 24)
    pull(store, worker, keys)
    flush(store)
    again = restart(setup, store, folder)
    last = setup.lookup(keys).slices[-1].extent_id.rsplit("/", 1)[1]
    (path,) = [path for path in files_in(folder) if path.stem == last]
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "half of it":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "all of it":
        path.write_bytes(b"")
    else:
        path.unlink()
    if damage == "its parts":
        other = make_extent(1, layer_groups=2)
        write_extent(path, other.parent, other.buffers)
    found = setup.lookup(keys)
    num_blocks, misses = fetch(setup, {"s": again}, keys, found)
    assert (num_blocks, len(misses)) == (12, 1)
    eventually(lambda: setup.visible(keys) == 12)
    eventually(lambda: not path.exists())
    assert disk_of(again).num_extents == 1
    # It can be stored anew.
    pull(again, worker, keys)
    assert_all_there(setup, again, keys)


def test_files_that_are_damaged_at_a_start_are_not_listed(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 24)
    pull(store, worker, keys)
    get(store.close.remote(30.0))
    ray.kill(store)
    broken = files_in(folder)[0]
    broken.write_bytes(broken.read_bytes()[:100])
    (folder / "00").mkdir(exist_ok=True)
    (folder / "00" / ("." + "0" * 32 + ".tmp")).write_bytes(b"x" * 5000)
    again = start(setup, folder)
    eventually(lambda: disk_of(again).is_scanned)
    assert (disk_of(again).num_found_extents, disk_of(again).num_unusable_files) == (1, 2)
    assert files_in(folder) != []
    assert broken not in files_in(folder)


@pytest.mark.parametrize("obstacle", ["a file in its place", "another store", "nobody's home", "a null byte"])
def test_a_folder_that_cannot_be_used_costs_the_tier_alone(
    obstacle: str, setup: Setup, worker: Any, folder: Path
) -> None:
    if obstacle == "another store":
        start_other = setup.store(store_id="other", disk=DiskSettings(str(folder), MIB))
        assert stats_of(start_other).disk is not None
    elif obstacle == "nobody's home":
        folder = Path("~nobody-has-this-name/kv")
    elif obstacle == "a null byte":
        folder = folder / "a\0b"
    else:
        folder.write_text("not a folder")
    store = start(setup, folder)
    assert stats_of(store).disk is None
    assert stats_of(store).refusals.keys() == {"disk_unavailable"}
    keys = chain("a", 12)
    pull(store, worker, keys)
    assert_all_there(setup, store, keys)


def test_a_folder_that_can_be_used_later_is(setup: Setup, worker: Any, folder: Path) -> None:
    folder.write_text("not a folder")
    store = start(setup, folder, retry_s=0.01)
    pull(store, worker, chain("a", 12))
    get(store.set_limits.remote(64 * MIB, 2 * MIB))
    eventually(lambda: stats_of(store).refusals["disk_unavailable"] > 1)
    folder.unlink()
    # What came to DRAM before is written too.
    eventually(lambda: len(files_in(folder)) == 1)
    flush(store)
    assert (disk_of(store).num_extents, disk_of(store).limit_bytes) == (1, 2 * MIB)


def test_a_folder_that_is_removed_is_made_anew(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder, retry_s=0.01)
    pull(store, worker, chain("a", 12))
    flush(store)
    folder.rename(folder.with_name("away"))  # removed one file after the other, it could be made anew meanwhile
    # What is in DRAM is written again.
    eventually(lambda: len(files_in(folder)) == 1)
    flush(store)
    assert stats_of(store).refusals["disk_unavailable"] == 1
    assert (disk_of(store).num_extents, setup.directory_stats()["bytes_by_store"]["s"].keys()) == (1, {"dram", "disk"})


def test_a_disk_that_refuses_a_write_is_left_alone_for_a_while(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    with frozen(folder):
        for name in "abc":
            pull(store, worker, chain(name, 12))
        flush(store)
    assert disk_of(store).refusals == {"disk_read_only": 1, "disk_paused": 2}
    assert (disk_of(store).num_queued_extents, disk_of(store).used_bytes) == (0, 0)
    for name in "abc":
        assert_all_there(setup, store, chain(name, 12))


def test_a_disk_that_refused_a_write_is_tried_again(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder, retry_s=0.01)
    keys = chain("a", 12)
    with frozen(folder):
        pull(store, worker, keys)
        eventually(lambda: disk_of(store).refusals.get("disk_read_only", 0) == 1)

    def is_written_when_read() -> bool:
        assert_all_there(setup, store, keys)
        return disk_of(store).num_extents == 1

    eventually(is_written_when_read)
    assert len(files_in(folder)) == 1


def test_a_restarted_directory_is_told_of_both_tiers(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder, ONE_EXTENT)
    a, b = chain("a", 12), chain("b", 12)
    pull(store, worker, a)
    pull(store, worker, b)
    flush(store)
    crash(setup.directory)
    eventually(lambda: setup.visible(a) == 12 and setup.visible(b) == 12)
    for keys in (a, b):
        assert_all_there(setup, store, keys)


def test_what_outlived_its_time_goes_from_both_tiers(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 12)
    pull(store, worker, keys)
    flush(store)
    get(setup.directory.set_policy.remote(PolicySpec(default_ttl_s=0.05)))
    eventually(lambda: setup.visible(keys) == 0)
    eventually(lambda: files_in(folder) == [] and stats_of(store).num_extents == 0)
    stats = setup.directory_stats()
    assert stats["expired"] == {"dram": 1, "disk": 1}
    assert (stats_of(store).used_bytes, disk_of(store).used_bytes) == (0, 0)


def test_limits_change_while_it_runs(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    for name in "abc":
        pull(store, worker, chain(name, 12))
    flush(store)
    get(store.set_limits.remote(ONE_EXTENT, 2 * MIB))
    assert (stats_of(store).num_extents, disk_of(store).num_extents) == (1, 2)
    assert [setup.visible(chain(name, 12)) for name in "abc"] == [0, 12, 12]
    get(store.set_limits.remote(4 * MIB, None))
    assert_all_there(setup, store, chain("b", 12))
    assert stats_of(store).num_extents == 2


def test_over_a_lowered_limit_goes_what_can_and_the_rest_once_it_is_released(
    setup: Setup, worker: Any, folder: Path
) -> None:
    store = start(setup, folder)
    for name in "abc":
        pull(store, worker, chain(name, 12))
    flush(store)
    leased = setup.lookup(chain("b", 12))
    get(store.set_limits.remote(0, 0))
    assert (stats_of(store).num_extents, disk_of(store).num_extents) == (1, 1)
    assert [setup.visible(chain(name, 12)) for name in "abc"] == [0, 12, 0]
    get(setup.directory.release.remote([leased.lease_id]))
    eventually(lambda: (stats_of(store).used_bytes, disk_of(store).used_bytes) == (0, 0))
    assert files_in(folder) == []
    assert setup.visible(chain("b", 12)) == 0


def test_prefetched_extents_are_in_dram(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 24)
    pull(store, worker, keys)
    again = restart(setup, store, folder)
    found = setup.lookup(keys)
    get(again.prefetch.remote([part.part_id for piece in found.slices for part in piece.parts]))
    eventually(lambda: {piece.tier for piece in setup.lookup(keys).slices} == {"dram"})
    assert stats_of(again).num_prefetched_extents == 2
    get(again.prefetch.remote([part.part_id for piece in found.slices for part in piece.parts]))
    assert disk_of(again).num_read_extents == 2


def test_many_readers_share_one_read(setup: Setup, worker: Any, folder: Path) -> None:
    store = start(setup, folder)
    keys = chain("a", 12)
    pull(store, worker, keys)
    again = restart(setup, store, folder)
    part_ids = [part.part_id for piece in setup.lookup(keys).slices for part in piece.parts]
    answers = ray.get([again.get_parts.remote(part_ids) for _ in range(8)], timeout=60)
    assert all(ref is not None for answer in answers for ref in answer)
    eventually(lambda: disk_of(again).num_read_extents == 1)
