"""One extent in one file: written whole or not at all, indexed without its payloads, mapped, verified.

`kv.disk.preamble` has the format. Files are never changed once they have their name. Whatever is wrong with one is a
`PartError`; no function here raises another error for what it finds on disk.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv.disk import preamble
from kv.disk.preamble import Preamble
from kv.errors import DiskWriteError, PartError
from kv.layout import KvLayout
from kv.part_range import PartRange, covers_all_lanes
from kv.parts import PREFIX_BYTES, PartHeader, decode_part, payload_offset, read_header

_FIRST_READ_BYTES = 4096
_MADV_POPULATE_READ = 22
"""Linux 5.14; Python 3.11 has no name for it."""
_LIBC = ctypes.CDLL(None, use_errno=True)

_WRITE_LABELS = {
    errno.ENOSPC: "disk_full",
    errno.EDQUOT: "disk_full",
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
    errno.EPERM: "disk_read_only",
    errno.EIO: "disk_io",
}


@dataclass(frozen=True, slots=True)
class ExtentIndex:
    """What a file holds, without the payloads."""

    layout: KvLayout
    fingerprint: bytes
    parent: bytes | None
    """Key of the block before the first one; None when the extent begins its chain."""
    first_block: int
    """Place of the first block in its chain."""
    keys: tuple[bytes, ...]
    """One for each block."""
    ranges: tuple[PartRange, ...]
    """Of the parts, in the file's order; blocks count from the start of the chain."""
    part_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoded parts together."""
        return sum(self.part_bytes)

    @property
    def disk_bytes(self) -> int:
        """What the file takes on disk."""
        return preamble.round_up(preamble.file_bytes(self.part_bytes))


def write_extent(path: Path, parent: bytes | None, buffers: Sequence[Any]) -> None:
    """Write a new file. It has its name only once it is complete.

    Nothing is forced to the disk: what a power failure destroys is found by the checksums.

    Args:
        path: not taken, its folder exists.
        parent: key of the block before the extent; None exactly when the extent begins its chain.
        buffers: the encoded parts of the extent, full blocks only. Their checksums are not looked at here.

    Raises:
        PartError: these are not the parts of one extent. Nothing was written.
        DiskWriteError: the file system refused. Nothing is left, unless it does not let us remove the temporary file.
    """
    views = [part_view(buffer) for buffer in buffers]
    starts = [_start_of(view) for view in views]
    sizes = tuple(len(view) for view in views)
    headers = [read_header(start, size) for start, size in zip(starts, sizes, strict=True)]
    _index(Preamble(parent, sizes, b""), headers)
    beginning = Preamble(parent, sizes, _headers_digest(starts)).encode()
    temporary = temporary_path(path)
    try:
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_at(fd, memoryview(beginning), 0)
                for view, offset in zip(views, preamble.part_offsets(sizes), strict=True):
                    _write_at(fd, view, offset)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise write_error(error, path) from error


def temporary_path(path: Path) -> Path:
    """Where a file is while it is being written."""
    return path.with_name(f".{path.stem}.tmp")


def part_view(buffer: Any) -> memoryview:
    """The bytes of a part that is to be written.

    Raises:
        PartError: this is no contiguous buffer.
    """
    try:
        return memoryview(buffer).cast("B")
    except (TypeError, ValueError) as error:
        raise PartError("type", f"{type(buffer).__name__} is no contiguous buffer: {error}") from error


def write_error(error: OSError, path: Path) -> DiskWriteError:
    """What the file system's refusal to change this file is called."""
    return DiskWriteError(_WRITE_LABELS.get(error.errno or 0, "disk_error"), f"{path}: {error.strerror or error}")


def read_index(path: Path) -> ExtentIndex:
    """What a file holds. Reads a few kilobytes; payloads are not verified, everything else is.

    Raises:
        PartError: anything is wrong with it.
    """
    with _opened(path) as (fd, size):
        return _read_index(fd, size)


def map_parts(path: Path) -> list[NDArray[np.uint8]]:
    """The encoded parts as read-only views of one memory mapping, which lives as long as one of them.

    Nothing is read yet, nor verified: `read_in` each before it is looked at, then give it to `kv.parts.decode_part`.

    Raises:
        PartError: anything is wrong with the file's own preamble or size, or it cannot be read.
    """
    with _opened(path) as (fd, size):
        found = _read_preamble(fd, size)
        try:
            mapping = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        except ValueError as error:  # the file is shorter than it was a moment ago
            raise PartError("truncated", str(error)) from error
        mapping.madvise(mmap.MADV_SEQUENTIAL)  # reads further ahead: a tenth faster where pages must come from the disk
        data = np.frombuffer(mapping, np.uint8)
    offsets = preamble.part_offsets(found.part_bytes)
    return [data[offset : offset + size] for offset, size in zip(offsets, found.part_bytes, strict=True)]


def read_in(data: NDArray[np.uint8]) -> None:
    """Bring all pages under a view of a mapping into memory, so that a file that cannot be read is an error here and
    not a signal in whoever looks at the view.

    `mmap.madvise` would hold the interpreter's lock meanwhile; a call through ctypes does not.

    Raises:
        PartError: unreadable; a page cannot be read, or there is no memory for it.
    """
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = data.ctypes.data + data.nbytes - start
    if _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), _MADV_POPULATE_READ) != 0:
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # a kernel before 5.14 does not know it: pages come when they are looked at
            raise PartError("unreadable", f"a page of a mapped file: {os.strerror(number)}")


def verify_file(path: Path) -> ExtentIndex:
    """Read the whole file and check every byte of it.

    Raises:
        PartError: anything is wrong with it.
    """
    with _opened(path) as (fd, size):
        index = _read_index(fd, size)
        end = len(_preamble_bytes(fd))
        for part, (offset, part_bytes) in enumerate(
            zip(preamble.part_offsets(index.part_bytes), index.part_bytes, strict=True)
        ):
            if _read(fd, offset - end, end).any():
                raise PartError("checksum", f"there are no zeros before part {part}")
            buffer = _read(fd, part_bytes, offset)
            header = read_header(_start_of(buffer.data), part_bytes)
            decode_part(buffer, header.expectation())
            end = offset + part_bytes
        return index


@contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file. Whatever the system says, also later on, is a `PartError`."""
    try:
        # Neither a link nor a pipe may lead us elsewhere or keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PartError("type", f"{path} is no regular file")
            yield fd, status.st_size
        finally:
            os.close(fd)
    except FileNotFoundError as error:
        raise PartError("gone", f"{path} is not there") from error
    except OSError as error:
        reason = "type" if error.errno in (errno.ELOOP, errno.ENXIO) else "unreadable"
        raise PartError(reason, f"{path}: {error.strerror or error}") from error


def _read_index(fd: int, size: int) -> ExtentIndex:
    found = _read_preamble(fd, size)
    starts = [
        _part_start(fd, offset, part_bytes)
        for offset, part_bytes in zip(preamble.part_offsets(found.part_bytes), found.part_bytes, strict=True)
    ]
    if _headers_digest(starts) != found.headers_digest:
        raise PartError("checksum", "the headers of the parts are not what was written")
    headers = [read_header(start, part_bytes) for start, part_bytes in zip(starts, found.part_bytes, strict=True)]
    return _index(found, headers)


def _read_preamble(fd: int, size: int) -> Preamble:
    found = preamble.parse(_preamble_bytes(fd))
    expected = preamble.file_bytes(found.part_bytes)
    if size != expected:
        reason = "truncated" if size < expected else "size"
        raise PartError(reason, f"the file has {size} bytes, its preamble tells of {expected}")
    return found


def _preamble_bytes(fd: int) -> bytes:
    start = os.pread(fd, _FIRST_READ_BYTES, 0)
    length = preamble.encoded_length(start)
    return start[:length] if length <= len(start) else os.pread(fd, length, 0)


def _start_of(part: memoryview) -> bytes:
    """What comes before the payload of a part in memory."""
    return part[: payload_offset(part[:PREFIX_BYTES].tobytes(), len(part))].tobytes()


def _part_start(fd: int, offset: int, part_bytes: int) -> bytes:
    """What comes before the payload of a part in a file."""
    start = os.pread(fd, min(_FIRST_READ_BYTES, part_bytes), offset)
    length = payload_offset(start, part_bytes)
    return start[:length] if length <= len(start) else os.pread(fd, length, offset)


def _read(fd: int, num_bytes: int, offset: int) -> NDArray[np.uint8]:
    buffer = np.empty(num_bytes, np.uint8)
    done = 0
    while done < num_bytes:
        count = os.preadv(fd, [buffer[done:].data], offset + done)
        if count == 0:
            raise PartError("truncated", f"the file ends at byte {offset + done}")
        done += count
    return buffer


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    # What is left out between two writes reads as zeros.
    while len(view) > 0:
        count = os.pwrite(fd, view, offset)
        view = view[count:]
        offset += count


def _headers_digest(starts: Sequence[bytes]) -> bytes:
    return bytes(xxhash.xxh3_128_digest(b"".join(starts)))


def _index(found: Preamble, headers: Sequence[PartHeader]) -> ExtentIndex:
    """Raises PartError unless these are all the parts of consecutive full blocks of one chain."""
    if not headers:
        raise PartError("lanes", "an extent without parts")
    layout, fingerprint = headers[0].layout, headers[0].fingerprint
    by_blocks: dict[tuple[int, int], list[PartHeader]] = {}
    for header in headers:
        if (header.layout, header.fingerprint) != (layout, fingerprint):
            raise PartError("fingerprint", "parts of different models in one file")
        if header.last_block_tokens != layout.block_tokens:
            raise PartError("tokens", f"a block with {header.last_block_tokens} of {layout.block_tokens} tokens")
        by_blocks.setdefault((header.range.first_block, header.range.num_blocks), []).append(header)
    first_block = min(by_blocks)[0]
    keys: list[bytes] = []
    for (start, _), group in sorted(by_blocks.items()):
        if start != first_block + len(keys):
            raise PartError("range", f"blocks from {start} follow {len(keys)} blocks from {first_block}")
        if not covers_all_lanes(layout, (header.range for header in group)):
            raise PartError("lanes", f"not every layer and KV head of the blocks from {start} once")
        if any(header.keys != group[0].keys for header in group):
            raise PartError("keys", f"parts of different blocks in the place of those from {start}")
        keys += group[0].keys
    if (found.parent is None) != (first_block == 0):
        raise PartError("keys", f"blocks from {first_block} with {'no' if found.parent is None else 'a'} parent")
    ranges = tuple(header.range for header in headers)
    return ExtentIndex(layout, fingerprint, found.parent, first_block, tuple(keys), ranges, found.part_bytes)
