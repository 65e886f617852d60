"""The operating system's cache of file contents: what of a file is in it, and how to read from the disk anyway."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)


class PagesKeptError(Exception):
    """The file system keeps files in memory, so nothing read from it says anything of a disk."""


def drop_pages(paths: Iterable[Path]) -> None:
    """Have the next read of these files come from the disk, as far as this machine can say: what is behind a virtual
    disk may have a cache of its own.

    Raises:
        PagesKeptError: more than a hundredth of a file stays in memory.
        OSError: a file cannot be opened or written out.
    """
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)  # only clean pages can go
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        share = cached_share(path)
        if share > 0.01:
            raise PagesKeptError(
                f"{100 * share:.0f} % of {path} stay in memory after they were dropped: give a folder on a disk, "
                "that nobody else reads meanwhile"
            )


def cached_share(path: Path) -> float:
    """Share of a file's pages that are in memory (mincore); 0 for an empty file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return 0.0
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapping:
            data = np.frombuffer(mapping, np.uint8)
            states = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
            failed = _LIBC.mincore(
                ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(states.ctypes.data)
            )
            del data  # or the mapping could not be closed
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return float((states & 1).mean())
