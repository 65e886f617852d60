from __future__ import annotations

import gc
import os
import random
import resource
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.disk.extent_file import write_extent
from kv.disk.findings import FoundExtent, Problem
from kv.disk.tier import DiskTier
from kv.errors import DiskWriteError, PartError
from tests.kv.disk.extents_to_write import (
    BIG,
    Extent,
    assert_decodes_to,
    make_extent,
    mounted_disk,
    parts_of,
    taken_bytes,
    without_privileges,
)

MIB = 1024 * 1024
SMALL = make_extent(2, layer_groups=2)
SMALL_BYTES = DiskTier.size_on_disk(SMALL.sizes)
LARGE = make_extent(8, layout=BIG)


def opened(folder: Path, limit_bytes: int = MIB, *, remove_leftovers: bool = True) -> DiskTier:
    return DiskTier.open(folder, limit_bytes, remove_leftovers=remove_leftovers)


def store(tier: DiskTier, extent: Extent = SMALL) -> str:
    extent_id = secrets.token_hex(16)
    assert tier.reserve(DiskTier.size_on_disk(extent.sizes))
    tier.write(extent_id, extent.parent, extent.buffers)
    return extent_id


def path_of(folder: Path, extent_id: str) -> Path:
    return folder / extent_id[:2] / f"{extent_id}.kv"


def found_ids(tier: DiskTier) -> list[str]:
    return [found.extent_id for found in tier.scan() if isinstance(found, FoundExtent)]


def problems(tier: DiskTier) -> list[Problem]:
    return [found for found in tier.scan() if isinstance(found, Problem)]


def reason_of_open(tier: DiskTier, extent_id: str) -> str:
    with pytest.raises(PartError) as caught:
        tier.open_extent(extent_id)
    return caught.value.reason


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "disk" / "tier"


@pytest.fixture
def tier(folder: Path) -> Iterator[DiskTier]:
    tier = opened(folder)
    yield tier
    tier.close()


def test_an_extent_is_written_read_and_removed(tier: DiskTier, folder: Path) -> None:
    assert (tier.used_bytes, tier.num_extents, tier.limit_bytes) == (0, 0, MIB)
    extent_id = store(tier)
    assert path_of(folder, extent_id).is_file()
    assert tier.used_bytes == SMALL_BYTES == taken_bytes(folder)
    assert tier.num_extents == 1
    file = tier.open_extent(extent_id)
    assert_decodes_to(parts_of(file), SMALL)

    assert tier.remove(extent_id)
    assert (tier.used_bytes, tier.num_extents) == (0, 0)
    assert taken_bytes(folder) == 0
    assert_decodes_to(parts_of(file), SMALL)
    file.close()
    assert reason_of_open(tier, extent_id) == "gone"
    assert tier.remove(extent_id)
    assert tier.remove(secrets.token_hex(16))
    tier.touch(extent_id)
    assert tier.used_bytes == 0


def test_nothing_is_reserved_beyond_the_limit(folder: Path) -> None:
    tier = opened(folder, 3 * SMALL_BYTES)
    store(tier)
    assert tier.shortage(2 * SMALL_BYTES) == 0
    assert tier.shortage(2 * SMALL_BYTES + 1) == 1
    assert not tier.reserve(2 * SMALL_BYTES + 1)
    assert tier.used_bytes == SMALL_BYTES
    assert tier.reserve(2 * SMALL_BYTES)
    assert tier.used_bytes == tier.limit_bytes
    assert not tier.reserve(1)
    tier.give_back(SMALL_BYTES)
    assert tier.shortage(0) == -SMALL_BYTES
    tier.set_limit(SMALL_BYTES)
    assert (tier.limit_bytes, tier.shortage(0)) == (SMALL_BYTES, SMALL_BYTES)
    assert not tier.reserve(0)
    tier.close()


def test_what_is_not_reserved_is_not_written(tier: DiskTier, folder: Path) -> None:
    tier.reserve(SMALL_BYTES - 1)
    with pytest.raises(ValueError, match="reserve"):
        tier.write(secrets.token_hex(16), SMALL.parent, SMALL.buffers)
    assert taken_bytes(folder) == 0
    assert tier.used_bytes == SMALL_BYTES - 1


def test_an_id_is_used_once(tier: DiskTier) -> None:
    extent_id = store(tier)
    tier.reserve(SMALL_BYTES)
    with pytest.raises(ValueError, match=extent_id):
        tier.write(extent_id, SMALL.parent, SMALL.buffers)
    assert tier.num_extents == 1


BAD_IDS = ["", "../../etc/passwd", "0" * 31, "0" * 33, "A" * 32, "g" * 32, "0" * 32 + "\n", "/" + "0" * 31, "٣" * 32]


@pytest.mark.parametrize("extent_id", BAD_IDS)
def test_only_hexadecimal_ids_become_paths(tier: DiskTier, folder: Path, extent_id: str) -> None:
    tier.reserve(SMALL_BYTES)
    before = sorted(folder.rglob("*"))
    calls: list[Callable[[], object]] = [
        lambda: tier.write(extent_id, SMALL.parent, SMALL.buffers),
        lambda: tier.open_extent(extent_id),
        lambda: tier.remove(extent_id),
        lambda: tier.touch(extent_id),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="hexadecimal"):
            call()
    assert sorted(folder.rglob("*")) == before


def test_a_negative_limit_is_refused(tier: DiskTier, folder: Path) -> None:
    with pytest.raises(ValueError, match="-1"):
        tier.set_limit(-1)
    with pytest.raises(ValueError, match="-1"):
        opened(folder.with_name("other"), -1)


def test_what_is_no_extent_gives_its_reservation_back(tier: DiskTier, folder: Path) -> None:
    assert tier.reserve(SMALL_BYTES)
    with pytest.raises(PartError) as caught:
        tier.write(secrets.token_hex(16), SMALL.keys[0], SMALL.buffers)
    assert caught.value.reason == "keys"
    assert tier.used_bytes == taken_bytes(folder) == 0


def test_a_full_disk_gives_the_reservation_back_and_leaves_nothing(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "size=1m") as disk:
        tier = opened(disk, 100 * MIB)
        kept = store(tier)
        assert tier.reserve(DiskTier.size_on_disk(LARGE.sizes))
        with pytest.raises(DiskWriteError) as caught:
            tier.write(secrets.token_hex(16), LARGE.parent, LARGE.buffers)
        assert caught.value.reason == "disk_full"
        assert tier.used_bytes == taken_bytes(disk) == SMALL_BYTES
        assert tier.num_extents == 1
        with tier.open_extent(kept) as file:
            assert_decodes_to(parts_of(file), SMALL)
        store(tier)
        gc.collect()
        tier.close()


def test_a_full_disk_can_be_opened_and_emptied(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "size=1m,nr_inodes=6") as disk:
        tier = opened(disk, MIB)
        extent_id = store(tier)
        tier.close()
        with suppress(OSError):
            for number in range(6):
                (disk / f"file-{number}").touch()
        with pytest.raises(OSError, match="No space"):
            (disk / "one more").touch()
        tier = opened(disk, MIB)
        assert found_ids(tier) == [extent_id]
        assert tier.remove(extent_id)
        tier.close()


def test_a_folder_that_became_read_only_refuses_and_keeps_count(tier: DiskTier, folder: Path) -> None:
    kept = store(tier)
    assert tier.reserve(SMALL_BYTES)
    for path in (folder, folder / kept[:2]):
        path.chmod(0o500)
    with without_privileges():
        with pytest.raises(DiskWriteError) as caught:
            tier.write(secrets.token_hex(16), SMALL.parent, SMALL.buffers)
        assert caught.value.reason == "disk_read_only"
        assert not tier.remove(kept)
        tier.touch(kept)
    assert tier.used_bytes == SMALL_BYTES
    assert tier.num_extents == 1
    for path in (folder, folder / kept[:2]):
        path.chmod(0o700)
    assert tier.remove(kept)
    assert tier.used_bytes == taken_bytes(folder) == 0


@pytest.mark.parametrize("kind", ["file", "link"])
def test_nothing_is_written_where_something_else_is_in_the_place_of_a_sub_folder(
    tier: DiskTier, folder: Path, kind: str
) -> None:
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir()
    if kind == "file":
        (folder / "3f").touch()
    else:
        (folder / "3f").symlink_to(elsewhere)
    assert tier.reserve(SMALL_BYTES)
    with pytest.raises(DiskWriteError) as caught:
        tier.write("3f" + "0" * 30, SMALL.parent, SMALL.buffers)
    assert caught.value.reason == "disk_blocked"
    assert str(folder / "3f") in str(caught.value)
    assert (tier.used_bytes, list(elsewhere.iterdir())) == (0, [])
    (folder / "3f").unlink()
    assert tier.reserve(SMALL_BYTES)
    tier.write("3f" + "0" * 30, SMALL.parent, SMALL.buffers)
    assert tier.used_bytes == taken_bytes(folder) == SMALL_BYTES


def test_what_a_failed_write_cannot_take_back_counts(tier: DiskTier, folder: Path) -> None:
    extent_id = secrets.token_hex(16)
    subfolder = folder / extent_id[:2]
    subfolder.mkdir()
    if subprocess.run(["chattr", "+a", subfolder], capture_output=True).returncode != 0:
        pytest.skip("a folder cannot be made append-only here")
    try:
        assert tier.reserve(SMALL_BYTES)
        with pytest.raises(DiskWriteError):
            tier.write(extent_id, SMALL.parent, SMALL.buffers)
    finally:
        subprocess.run(["chattr", "-a", subfolder], check=True)
    assert [path.name for path in subfolder.iterdir()] == [f".{extent_id}.tmp"]
    assert tier.used_bytes == tier.other_bytes == taken_bytes(folder) == SMALL_BYTES
    assert tier.num_extents == 0
    tier.close()
    reopened = opened(folder)
    assert reopened.used_bytes == taken_bytes(folder) == 0
    reopened.close()


def test_a_restart_finds_what_was_there_the_longest_unused_first(folder: Path) -> None:
    tier = opened(folder)
    ids = [store(tier, make_extent(2, first_block=block, seed=block)) for block in range(5)]
    now_s = time.time()
    for age_s, extent_id in enumerate(reversed(ids)):
        os.utime(path_of(folder, extent_id), (now_s - 100 - age_s, now_s - 100 - age_s))
    used_bytes = tier.used_bytes
    tier.close()

    tier = opened(folder)
    assert tier.used_bytes == used_bytes == taken_bytes(folder)
    found = [item for item in tier.scan() if isinstance(item, FoundExtent)]
    assert [item.extent_id for item in found] == ids
    assert [item.index.first_block for item in found] == [0, 1, 2, 3, 4]
    assert found[3].index.parent == make_extent(2, first_block=3, seed=3).parent
    assert found[0].last_use_s == pytest.approx(now_s - 104, abs=0.01)
    tier.touch(ids[0])
    tier.close()

    tier = opened(folder)
    assert found_ids(tier) == ids[1:] + ids[:1]
    tier.close()


def test_a_time_in_the_future_is_no_later_than_now(folder: Path) -> None:
    tier = opened(folder)
    old, ahead = store(tier), store(tier)
    os.utime(path_of(folder, old), (1e9, 1e9))
    os.utime(path_of(folder, ahead), (9e9, 9e9))
    tier.close()
    tier = opened(folder)
    found = [item for item in tier.scan() if isinstance(item, FoundExtent)]
    assert [item.extent_id for item in found] == [old, ahead]
    assert found[0].last_use_s == 1e9
    assert found[1].last_use_s <= time.time()
    tier.close()


def test_a_limit_below_what_is_there_must_be_met_by_removing(folder: Path) -> None:
    tier = opened(folder)
    ids = [store(tier) for _ in range(4)]
    tier.close()
    tier = opened(folder, 2 * SMALL_BYTES)
    assert tier.shortage(0) == 2 * SMALL_BYTES
    assert not tier.reserve(1)
    assert not tier.reserve(0)
    for extent_id in ids[:2]:
        assert not tier.reserve(SMALL_BYTES)
        tier.remove(extent_id)
    assert tier.shortage(0) == 0
    tier.remove(ids[2])
    store(tier)
    assert tier.used_bytes == taken_bytes(folder) == 2 * SMALL_BYTES
    tier.close()


def populate_with_leftovers(folder: Path) -> tuple[str, dict[str, Path]]:
    """A good extent, and one of each thing that should not be there."""
    tier = opened(folder)
    good = store(tier)
    broken, cut, empty, strange = (store(tier) for _ in range(4))
    tier.close()
    things = {
        "broken": path_of(folder, broken),
        "cut": path_of(folder, cut),
        "empty": path_of(folder, empty),
        "strange": path_of(folder, strange),
        "temporary": folder / good[:2] / f".{good}.tmp",
        "named wrongly": folder / good[:2] / "notes.txt",
        "in another folder": folder / good[:2] / ("0" * 32 + ".kv" if good[:2] != "00" else "1" * 32 + ".kv"),
        "link": folder / good[:2] / "link.kv",
        "folder of others": folder / good[:2] / "others",
        "outside": folder / "readme",
    }
    data = bytearray(things["broken"].read_bytes())
    data[20] ^= 1
    things["broken"].write_bytes(data)
    os.truncate(things["cut"], 5000)
    os.truncate(things["empty"], 0)
    things["strange"].write_bytes(b"\x89PNG" * 1000)
    things["temporary"].write_bytes(b"t" * 5000)
    things["named wrongly"].write_bytes(b"n" * 100)
    write_extent(things["in another folder"], SMALL.parent, SMALL.buffers)
    things["link"].symlink_to(path_of(folder, good))
    things["folder of others"].mkdir()
    (things["folder of others"] / "inner").mkdir()
    (things["folder of others"] / "inner" / "data").write_bytes(b"d" * 4097)
    things["outside"].write_bytes(b"o" * 4096)
    return good, things


REASONS = {
    "broken": "checksum",
    "cut": "truncated",
    "empty": "truncated",
    "strange": "magic",
    "temporary": "temporary",
    "named wrongly": "foreign",
    "in another folder": "foreign",
    "link": "foreign",
    "folder of others": "foreign",
    "outside": "foreign",
}


def test_left_overs_are_removed_where_only_a_tier_writes(folder: Path) -> None:
    good, things = populate_with_leftovers(folder)
    tier = opened(folder)
    found = {problem.path: problem for problem in problems(tier)}
    assert {path: problem.reason for path, problem in found.items()} == {
        things[name]: reason for name, reason in REASONS.items()
    }
    for name, path in things.items():
        stays = name in ("folder of others", "outside")
        assert os.path.lexists(path) == stays, name
        assert found[path].is_removed == (not stays)
    assert (things["folder of others"] / "inner" / "data").exists()
    assert tier.used_bytes == taken_bytes(folder) == SMALL_BYTES + 8192 + 4096
    assert tier.other_bytes == 8192 + 4096
    assert tier.num_extents == 1
    with tier.open_extent(good) as file:
        assert_decodes_to(parts_of(file), SMALL)
    tier.close()


def test_left_overs_stay_and_count_if_so_wished(folder: Path) -> None:
    good, things = populate_with_leftovers(folder)
    before = taken_bytes(folder)
    tier = opened(folder, remove_leftovers=False)
    assert tier.used_bytes == before
    found = problems(tier)
    assert {problem.path: problem.reason for problem in found} == {
        things[name]: reason for name, reason in REASONS.items()
    }
    assert not any(problem.is_removed for problem in found)
    assert all(os.path.lexists(path) for path in things.values())
    assert found_ids(tier) == [good]
    assert tier.used_bytes == taken_bytes(folder) == before
    for problem in found:
        if problem.extent_id is not None:
            assert tier.remove(problem.extent_id)
    assert tier.used_bytes == taken_bytes(folder) == tier.other_bytes + SMALL_BYTES
    tier.close()


def test_what_others_remove_or_write_to_is_counted_anew(folder: Path) -> None:
    good, things = populate_with_leftovers(folder)
    tier = opened(folder, remove_leftovers=False)
    things["outside"].write_bytes(b"o" * 20000)
    things["named wrongly"].unlink()
    (things["folder of others"] / "inner" / "data").unlink()
    before = tier.used_bytes
    tier.recount()
    assert tier.used_bytes == taken_bytes(folder) == before + (20480 - 4096) - 4096 - 8192
    shutil.rmtree(things["folder of others"])
    things["outside"].unlink()
    tier.recount()
    assert tier.used_bytes == taken_bytes(folder)
    with tier.open_extent(good) as file:
        assert_decodes_to(parts_of(file), SMALL)
    tier.close()


def test_what_cannot_be_read_is_not_taken_for_broken(folder: Path) -> None:
    tier = opened(folder)
    extent_id = store(tier)
    tier.close()
    tier = opened(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        (problem,) = problems(tier)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (problem.reason, problem.extent_id, problem.is_removed) == ("unreadable", extent_id, False)
    assert tier.used_bytes == SMALL_BYTES
    assert found_ids(tier) == [extent_id]
    tier.close()


def test_a_scan_goes_on_beside_writes_and_removals(folder: Path) -> None:
    tier = opened(folder)
    ids = [store(tier) for _ in range(6)]
    for age_s, extent_id in enumerate(ids):
        os.utime(path_of(folder, extent_id), (1e9 + age_s, 1e9 + age_s))
    tier.close()
    tier = opened(folder)
    scan = tier.scan()
    assert next(scan).extent_id == ids[0]
    new = store(tier)
    tier.remove(ids[0])
    tier.remove(ids[2])
    path_of(folder, ids[3]).unlink()
    assert [found.extent_id for found in scan] == [ids[1], ids[4], ids[5]]
    assert new not in found_ids(tier)
    assert tier.num_extents == 4
    assert tier.used_bytes == taken_bytes(folder) == 4 * SMALL_BYTES
    tier.close()


def wait_for_any(paths: list[Path]) -> None:
    while not any(path.exists() for path in paths):
        time.sleep(0)


def test_an_extent_removed_while_it_is_written_goes(folder: Path) -> None:
    tier = opened(folder, 100 * MIB)
    for _ in range(10):
        extent_id = secrets.token_hex(16)
        path = path_of(folder, extent_id)
        assert tier.reserve(DiskTier.size_on_disk(LARGE.sizes))
        writer = threading.Thread(target=tier.write, args=(extent_id, LARGE.parent, LARGE.buffers))
        writer.start()
        wait_for_any([path, path.with_name(f".{extent_id}.tmp")])
        assert tier.remove(extent_id)
        writer.join()
        assert not path.exists()
    assert tier.used_bytes == taken_bytes(folder) == tier.num_extents == 0
    tier.close()


def test_closing_waits_for_what_is_being_written(folder: Path) -> None:
    for _ in range(10):
        tier = opened(folder, 1000 * MIB)
        before = tier.num_extents
        extent_id = secrets.token_hex(16)
        path = path_of(folder, extent_id)
        assert tier.reserve(DiskTier.size_on_disk(LARGE.sizes))
        writer = threading.Thread(target=tier.write, args=(extent_id, LARGE.parent, LARGE.buffers))
        writer.start()
        wait_for_any([path, path.with_name(f".{extent_id}.tmp")])
        tier.close()
        assert path.exists()
        assert not path.with_name(f".{extent_id}.tmp").exists()
        writer.join()
        tier = opened(folder, 1000 * MIB)
        assert tier.num_extents == before + 1
        tier.close()


def test_a_closed_tier_changes_nothing(folder: Path) -> None:
    tier = opened(folder)
    extent_id = store(tier)
    assert tier.reserve(SMALL_BYTES)
    tier.close()
    tier.close()
    opened(folder).close()
    before = path_of(folder, extent_id).stat().st_mtime_ns
    assert not tier.reserve(0)
    with pytest.raises(DiskWriteError) as caught:
        tier.write(secrets.token_hex(16), SMALL.parent, SMALL.buffers)
    assert caught.value.reason == "closed"
    tier.remove(extent_id)
    tier.touch(extent_id)
    assert found_ids(tier) == []
    assert path_of(folder, extent_id).stat().st_mtime_ns == before


def use_from_many_threads(tier: DiskTier, extents: list[list[Extent]]) -> None:
    """Each thread writes its extents, removing extents of any thread while there is no room."""
    stored: list[str] = []

    def run(mine: list[Extent]) -> None:
        order = random.Random(len(mine))
        for extent in mine:
            num_bytes = DiskTier.size_on_disk(extent.sizes)
            if num_bytes > tier.limit_bytes:
                continue
            while not tier.reserve(num_bytes):
                try:
                    tier.remove(stored.pop(order.randrange(len(stored))))
                except (ValueError, IndexError):  # all room is reserved by others just now
                    time.sleep(0)
            extent_id = secrets.token_hex(16)
            tier.write(extent_id, extent.parent, extent.buffers)
            stored.append(extent_id)
            assert tier.used_bytes <= tier.limit_bytes

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run, mine) for mine in extents]:
            done.result()
    assert len(stored) == tier.num_extents
    for extent_id in stored:
        tier.open_extent(extent_id).close()


WRITERS = st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=8, max_size=8)


@settings(max_examples=25, deadline=None)
@given(WRITERS, st.integers(2, 60))
def test_the_limit_holds_under_concurrent_writers(blocks: list[list[int]], limit_pages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tier = opened(Path(folder), limit_pages * 4096)
        use_from_many_threads(tier, [[make_extent(count) for count in mine] for mine in blocks])
        assert tier.used_bytes == taken_bytes(Path(folder)) <= tier.limit_bytes
        tier.close()


def test_a_disk_as_large_as_the_limit_never_gets_full(tmp_path: Path) -> None:
    sizes = random.Random(0)
    with mounted_disk(tmp_path / "disk", "size=256k") as disk:
        tier = opened(disk, 256 * 1024)
        use_from_many_threads(tier, [[make_extent(sizes.randint(1, 30)) for _ in range(40)] for _ in range(8)])
        assert tier.used_bytes == taken_bytes(disk)
        gc.collect()
        tier.close()
