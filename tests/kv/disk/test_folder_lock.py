from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kv.disk.folder import MARKER
from kv.disk.tier import DiskTier
from kv.errors import DiskTierError, DiskWriteError
from tests.kv.disk.extents_to_write import make_extent, mounted_disk, taken_bytes, without_privileges

HOLDER = """
import sys
from pathlib import Path
from kv.disk.tier import DiskTier
tier = DiskTier.open(Path(sys.argv[1]), 10, remove_leftovers=True)
print("locked", flush=True)
sys.stdin.read()
"""


def refusal(folder: Path) -> str:
    with pytest.raises(DiskTierError) as caught:
        DiskTier.open(folder, 10, remove_leftovers=True)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_a_folder_is_used_by_one_store_at_a_time(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, 10, remove_leftovers=True)
    assert "another store" in refusal(tmp_path)
    tier.close()
    DiskTier.open(tmp_path, 10, remove_leftovers=True).close()


def test_the_lock_of_a_process_ends_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        message = refusal(tmp_path)
        assert "another store" in message
        assert "folder of its own" in message
        holder.kill()
    DiskTier.open(tmp_path, 10, remove_leftovers=True).close()


@pytest.mark.parametrize("what", ["the lock file", "the folder", "the lock file, and another store has one"])
def test_a_folder_whose_lock_is_gone_is_not_written_to(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "tier"
    extent = make_extent()
    num_bytes = DiskTier.size_on_disk(extent.sizes)
    tier = DiskTier.open(folder, num_bytes, remove_leftovers=True)
    assert not tier.is_lost()
    assert tier.reserve(num_bytes)
    if what == "the folder":
        shutil.rmtree(folder)
    else:
        (folder / MARKER).unlink()
    others = [DiskTier.open(folder, 10, remove_leftovers=True)] if "another" in what else []
    assert tier.is_lost()
    with pytest.raises(DiskWriteError) as caught:
        tier.write("0" * 32, extent.parent, extent.buffers)
    assert (caught.value.reason, tier.used_bytes) == ("disk_lost", 0)
    assert taken_bytes(folder) == 0
    assert not any(other.is_lost() for other in others)
    for each in [tier, *others]:
        each.close()
    tier = DiskTier.open(folder, num_bytes, remove_leftovers=True)
    assert tier.reserve(num_bytes)
    tier.write("0" * 32, extent.parent, extent.buffers)
    tier.close()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "File exists" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "tier")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_must_not_be_written_is_refused(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "folder" / "tier"
    (folder if exists else folder.parent).mkdir(parents=True)
    (folder if exists else folder.parent).chmod(0o500)
    with without_privileges():
        assert "Permission denied" in refusal(folder)


def test_a_folder_in_which_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    DiskTier.open(folder, 10, remove_leftovers=True).close()
    freeze, thaw = (("chattr", "+i"), ("chattr", "-i")) if os.geteuid() == 0 else (("chmod", "500"), ("chmod", "700"))
    if subprocess.run([*freeze, folder], capture_output=True).returncode != 0:
        pytest.skip("a folder cannot be made immutable here")
    try:
        assert "not permitted" in refusal(folder) or "denied" in refusal(folder)
    finally:
        subprocess.run([*thaw, folder], check=True)
    DiskTier.open(folder, 10, remove_leftovers=True).close()


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "ro") as disk:
        assert "Read-only file system" in refusal(disk)
        assert "Read-only file system" in refusal(disk / "tier")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "thesis.txt").write_text("the only copy")
    assert "ab" in refusal(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["ab", "thesis.txt"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_in_the_place_of_a_sub_folder_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "tier"
    DiskTier.open(folder, 10, remove_leftovers=True).close()
    if kind == "file":
        (folder / "3f").touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        (folder / "3f").symlink_to(tmp_path / "elsewhere")
    assert str(folder / "3f") in refusal(folder)


def test_a_refused_folder_is_not_kept_locked(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    DiskTier.open(folder, 10, remove_leftovers=True).close()
    (folder / "00").mkdir()
    (folder / "00").chmod(0)
    with without_privileges():
        refusal(folder)
    (folder / "00").chmod(0o700)
    DiskTier.open(folder, 10, remove_leftovers=True).close()
