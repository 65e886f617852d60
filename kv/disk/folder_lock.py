"""Taking over a folder as a disk tier: at most one store at a time, and no folder that is something else."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path

from kv.disk.folder import MARKER, is_subfolder_name
from kv.errors import DiskTierError


def take_over(folder: Path) -> int:
    """Create the folder if need be, check that it can be written, and lock it.

    Returns:
        A descriptor. The lock lives as long as it is open, and ends with the process.

    Raises:
        DiskTierError: the folder cannot be used, is something else, or another store is using it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        taken = sorted(entry.name for entry in os.scandir(folder) if is_subfolder_name(entry.name))
        if taken and not (folder / MARKER).exists():
            raise DiskTierError(
                f"{folder} is no disk tier, but has {taken[0]!r} in it, where a tier would keep its files: give it a "
                f"folder of its own, or, if this was one, create an empty file {MARKER} in it"
            )
        blocked = [name for name in taken if (folder / name).is_symlink() or not (folder / name).is_dir()]
        if blocked:
            raise DiskTierError(f"{folder / blocked[0]} is in the place of a folder of the disk tier: remove it")
        lock_fd = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unusable(folder, error) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _try_to_write(folder)
    except BlockingIOError as error:
        os.close(lock_fd)
        raise DiskTierError(
            f"{folder} is used by another store: give each store a folder of its own, or stop the other one "
            f"(`fuser {folder / MARKER}` tells its process)"
        ) from error
    except OSError as error:
        os.close(lock_fd)
        raise unusable(folder, error) from error
    return lock_fd


def is_held(folder: Path, lock_fd: int) -> bool:
    """Whether the folder still has the lock file that this descriptor locks. After somebody removed it, or all of the
    folder, another store may have made and locked its own."""
    try:
        return os.path.samestat(os.stat(folder / MARKER, follow_symlinks=False), os.fstat(lock_fd))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # it cannot be told now


def _try_to_write(folder: Path) -> None:
    probe = folder / f".{secrets.token_hex(16)}.tmp"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    except OSError as error:
        # A full disk, maybe full of ours, can still be read and made emptier.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def unusable(folder: Path, error: OSError) -> DiskTierError:
    """What to tell whoever gave this folder."""
    return DiskTierError(
        f"{folder} cannot be used as a disk tier: {error.strerror or error}"
        f"{f' ({error.filename})' if error.filename else ''}; give a folder that this process may create and write, "
        "on a local file system"
    )
