from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from load_tests.page_cache import PagesKeptError, cached_share, drop_pages

PAGES = 256


@pytest.fixture
def content() -> bytes:
    return os.urandom(PAGES * mmap.PAGESIZE)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(content)
    try:
        drop_pages([path])
    except PagesKeptError:
        pytest.skip("the temporary folder lies in memory")
    return path


def test_dropped_pages_are_not_in_memory_and_lost_neither(path: Path, content: bytes) -> None:
    assert cached_share(path) == 0
    assert path.read_bytes() == content
    assert cached_share(path) == 1
    drop_pages([path])
    assert cached_share(path) == 0


def test_pages_are_counted_one_by_one(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
        os.pread(file.fileno(), 1, 10 * mmap.PAGESIZE)
    assert cached_share(path) == pytest.approx(1 / PAGES)


def test_pages_that_stay_are_an_error(path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        assert len(bytes(mapping)) == PAGES * mmap.PAGESIZE  # a page that a process has mapped cannot go
        with pytest.raises(PagesKeptError, match="100 % of"):
            drop_pages([path])


def test_a_file_in_memory_is_an_error() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("there is no /dev/shm")
    path = shared / f"equipoise-test-{os.getpid()}"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    try:
        with pytest.raises(PagesKeptError, match="give a folder on a disk"):
            drop_pages([path])
    finally:
        path.unlink()


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cached_share(tmp_path / "empty") == 0
