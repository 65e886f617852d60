from __future__ import annotations

import mmap
import os
import resource
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.disk.extent_file import write_extent
from kv.disk.open_extent import OpenExtent
from kv.disk.read_buffer import ReadBuffer
from kv.errors import PartError
from kv.parts import decode_part
from tests.kv.disk.extents_to_write import BIG, Extent, make_extent

EXTENT = make_extent(1, layout=BIG, layer_groups=2)


def written(path: Path, extent: Extent = EXTENT) -> Path:
    write_extent(path, extent.parent, extent.buffers)
    return path


def test_parts_come_one_after_the_other_in_the_same_memory(tmp_path: Path) -> None:
    buffer = ReadBuffer()
    with OpenExtent(written(tmp_path / "extent.kv")) as file:
        (tmp_path / "extent.kv").unlink()  # an eviction, which the reader does not notice
        assert list(file.part_bytes) == EXTENT.sizes
        for part in (1, 0, 1):
            read = file.read(part, buffer)
            np.testing.assert_array_equal(read, EXTENT.buffers[part])
            payload = decode_part(read, EXTENT.headers[part].expectation()).payload
            assert payload.ctypes.data % 64 == 0
            assert read.ctypes.data == buffer.take(1).ctypes.data
            assert read.ctypes.data % mmap.PAGESIZE == 0


def test_threads_do_not_share_memory() -> None:
    buffer, both = ReadBuffer(), Barrier(2)

    def fill(value: int) -> bool:
        memory = buffer.take(4096)
        both.wait()
        memory[:] = value
        both.wait()
        return bool((memory == value).all())

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fill, (1, 2))) == [True, True]


def test_memory_grows_to_the_largest_part() -> None:
    buffer = ReadBuffer()
    for num_bytes in (10, 5000, 0, 1, 9000, 5000):
        memory = buffer.take(num_bytes)
        assert len(memory) == num_bytes
        memory[:] = 1
    assert np.shares_memory(buffer.take(9000), memory)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "extent.kv")
        whole = path.read_bytes()
        starts = [whole.index(part.tobytes()) for part in EXTENT.buffers]
        left = data.draw(st.integers(0, len(whole) - 1))
        buffer = ReadBuffer()
        with OpenExtent(path) as file:
            file.read(0, buffer)
            os.truncate(path, left)
            for part, (start, content) in enumerate(zip(starts, EXTENT.buffers, strict=True)):
                if start + len(content) <= left:
                    np.testing.assert_array_equal(file.read(part, buffer), content)
                else:
                    with pytest.raises(PartError) as refused:
                        file.read(part, buffer)
                    assert refused.value.reason == "truncated"


def test_without_memory_for_it_a_part_is_unreadable(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with OpenExtent(written(tmp_path / "extent.kv")) as file:
        resource.setrlimit(resource.RLIMIT_AS, (1, hard))
        try:
            with pytest.raises(PartError) as refused:
                file.read(0, ReadBuffer())
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert refused.value.reason == "unreadable"


def test_what_was_opened_is_closed(tmp_path: Path) -> None:
    path = written(tmp_path / "extent.kv")
    before = os.listdir("/proc/self/fd")
    file = OpenExtent(path)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    file.close()
    file.close()
    os.truncate(path, 100)
    with pytest.raises(PartError, match="truncated"):
        OpenExtent(path)
    assert os.listdir("/proc/self/fd") == before
