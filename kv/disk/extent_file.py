"""One extent in one file: written whole or not at all, indexed without its payloads, verified.

`kv.disk.preamble` has the format. Files are never changed once they have their name. Whatever is wrong with one is a
`PartError`; no function here raises another error for what it finds on disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv.disk import preamble
from kv.disk.open_extent import FIRST_READ_BYTES, opened, preamble_bytes, read_into, read_preamble
from kv.disk.preamble import Preamble
from kv.errors import DiskWriteError, PartError
from kv.layout import KvLayout
from kv.part_range import PartRange, covers_all_lanes
from kv.parts import PREFIX_BYTES, PartHeader, decode_part, payload_offset, read_header

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
    with opened(path) as (fd, size):
        return _read_index(fd, size)


def verify_file(path: Path) -> ExtentIndex:
    """Read the whole file and check every byte of it.

    Raises:
        PartError: anything is wrong with it.
    """
    with opened(path) as (fd, size):
        index = _read_index(fd, size)
        end = len(preamble_bytes(fd))
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


def _read_index(fd: int, size: int) -> ExtentIndex:
    found = read_preamble(fd, size)
    starts = [
        _part_start(fd, offset, part_bytes)
        for offset, part_bytes in zip(preamble.part_offsets(found.part_bytes), found.part_bytes, strict=True)
    ]
    if _headers_digest(starts) != found.headers_digest:
        raise PartError("checksum", "the headers of the parts are not what was written")
    headers = [read_header(start, part_bytes) for start, part_bytes in zip(starts, found.part_bytes, strict=True)]
    return _index(found, headers)


def _start_of(part: memoryview) -> bytes:
    """What comes before the payload of a part in memory."""
    return part[: payload_offset(part[:PREFIX_BYTES].tobytes(), len(part))].tobytes()


def _part_start(fd: int, offset: int, part_bytes: int) -> bytes:
    """What comes before the payload of a part in a file."""
    start = os.pread(fd, min(FIRST_READ_BYTES, part_bytes), offset)
    length = payload_offset(start, part_bytes)
    return start[:length] if length <= len(start) else os.pread(fd, length, offset)


def _read(fd: int, num_bytes: int, offset: int) -> NDArray[np.uint8]:
    buffer = np.empty(num_bytes, np.uint8)
    read_into(buffer, fd, offset)
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
