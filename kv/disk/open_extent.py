"""A file of the disk tier that is open to be read, and reading the parts of one.

Files are read and never mapped: one that others cut while it is mapped is a signal that ends the process.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kv.disk import preamble
from kv.disk.preamble import Preamble
from kv.disk.read_buffer import ReadBuffer
from kv.errors import PartError

FIRST_READ_BYTES = 4096
"""Enough for what stands before the payloads of nearly every file."""


class OpenExtent:
    """A file that is open, so that its parts can be read though its name may go meanwhile. Used from one thread at a
    time; close it, or use it in a `with`.

    Raises:
        PartError: anything is wrong with the file's own preamble or size, or it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as stack:
            self._fd, size = stack.enter_context(opened(path))
            self.part_bytes = read_preamble(self._fd, size).part_bytes
            """Of the encoded parts."""
            self._to_close = stack.pop_all()
        self._offsets = preamble.part_offsets(self.part_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Not to be read any more. Closing twice is no error."""
        self._to_close.close()

    def read(self, part: int, buffer: ReadBuffer) -> NDArray[np.uint8]:
        """An encoded part, in memory of `buffer`. It is not verified: give it to `kv.parts.decode_part`.

        Raises:
            PartError: truncated; the file was cut since it was opened. Unreadable; the system refuses, or there is no
                memory for it.
        """
        with system_errors(self._path):
            memory = buffer.take(self.part_bytes[part])
            read_into(memory, self._fd, self._offsets[part])
            return memory


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file. Whatever the system says, also later on, is a `PartError`."""
    with system_errors(path):
        # Neither a link nor a pipe may lead us elsewhere or keep us waiting.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise PartError("type", f"{path} is no regular file")
            yield fd, status.st_size
        finally:
            os.close(fd)


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """What the system says of a file that is being read is a `PartError`."""
    try:
        yield
    except FileNotFoundError as error:
        raise PartError("gone", f"{path} is not there") from error
    except OSError as error:
        reason = "type" if error.errno in (errno.ELOOP, errno.ENXIO) else "unreadable"
        raise PartError(reason, f"{path}: {error.strerror or error}") from error


def read_preamble(fd: int, size: int) -> Preamble:
    """What stands before the parts of a file.

    Args:
        size: of the file.

    Raises:
        PartError: it is damaged, or the file's size is another than it tells of.
    """
    found = preamble.parse(preamble_bytes(fd))
    expected = preamble.file_bytes(found.part_bytes)
    if size != expected:
        reason = "truncated" if size < expected else "size"
        raise PartError(reason, f"the file has {size} bytes, its preamble tells of {expected}")
    return found


def preamble_bytes(fd: int) -> bytes:
    """What stands before the parts of a file, encoded. Raises PartError."""
    start = os.pread(fd, FIRST_READ_BYTES, 0)
    length = preamble.encoded_length(start)
    return start[:length] if length <= len(start) else os.pread(fd, length, 0)


def read_into(buffer: NDArray[np.uint8], fd: int, offset: int) -> None:
    """Fill a buffer from a file. Raises PartError where the file ends first."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:].data], offset + done)
        if count == 0:
            raise PartError("truncated", f"the file ends at byte {offset + done}")
        done += count
