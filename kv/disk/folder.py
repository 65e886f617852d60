"""The folder of a disk tier: names in it, and what it holds by name and size. Nothing is opened here.

equipoise-disk-tier.lock        empty; says that the folder is one, and is locked by the store that uses it
3f/3f09...c2.kv                 an extent, named by its id (32 hexadecimal digits, see `kv.shards`) in a folder of the
                                first two
3f/.3f09...c2.tmp               an extent that is being written
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kv.disk.preamble import round_up

MARKER = "equipoise-disk-tier.lock"

_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
_EXTENT_ID = re.compile(r"[0-9a-f]{32}")
_EXTENT_NAME = re.compile(r"([0-9a-f]{32})\.kv")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.tmp")


@dataclass(frozen=True, slots=True)
class ListedExtent:
    """A file with an extent's name. What is in it was not looked at."""

    extent_id: str
    disk_bytes: int
    last_use_s: float
    """Modification time, seconds since 1970."""


@dataclass(frozen=True, slots=True)
class OtherEntry:
    """A file that is no extent, or a whole folder that is none of ours."""

    path: Path
    reason: str
    """temporary (an extent that was not finished) or foreign."""
    disk_bytes: int
    last_use_s: float
    is_removable: bool
    """It is a file, and lies where only a disk tier writes."""


@dataclass(frozen=True, slots=True)
class FolderListing:
    """Everything in a folder, except marker and sub-folders of the tier."""

    extents: list[ListedExtent] = field(default_factory=list)
    others: list[OtherEntry] = field(default_factory=list)


def extent_path(folder: Path, extent_id: str) -> Path:
    """Where an extent lies.

    Raises:
        ValueError: the id is not 32 hexadecimal digits, lower case. Nothing else ever becomes a path.
    """
    if _EXTENT_ID.fullmatch(extent_id) is None:
        raise ValueError(f"extent id {extent_id!r} is not allowed: give 32 hexadecimal digits, lower case")
    return folder / extent_id[:2] / f"{extent_id}.kv"


def is_subfolder_name(name: str) -> bool:
    """Whether the tier keeps extents in a folder of this name."""
    return _SUBFOLDER.fullmatch(name) is not None


def list_folder(folder: Path) -> FolderListing:
    """Everything in the folder. Links are not followed; what vanishes meanwhile is left out.

    Raises:
        OSError: the folder, or a sub-folder of the tier, cannot be listed.
    """
    listing = FolderListing()
    for entry in _entries(folder):
        if is_subfolder_name(entry.name) and entry.is_dir(follow_symlinks=False):
            for inner in _entries(Path(entry.path)):
                _list_inner(listing, entry.name, inner)
        elif entry.name != MARKER:
            _add_other(listing, entry, "foreign", is_ours=False)
    return listing


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return


def _list_inner(listing: FolderListing, subfolder: str, entry: os.DirEntry[str]) -> None:
    match = _EXTENT_NAME.fullmatch(entry.name)
    if match is None or not match[1].startswith(subfolder) or not entry.is_file(follow_symlinks=False):
        is_temporary = _TEMPORARY_NAME.fullmatch(entry.name) is not None
        _add_other(listing, entry, "temporary" if is_temporary else "foreign", is_ours=True)
        return
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    listing.extents.append(ListedExtent(match[1], _disk_bytes(status), status.st_mtime))


def _add_other(listing: FolderListing, entry: os.DirEntry[str], reason: str, *, is_ours: bool) -> None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    is_folder = entry.is_dir(follow_symlinks=False)
    num_bytes = _folder_bytes(entry.path) if is_folder else _disk_bytes(status)
    listing.others.append(
        OtherEntry(Path(entry.path), reason, num_bytes, status.st_mtime, is_removable=is_ours and not is_folder)
    )


def bytes_at(path: Path) -> int:
    """What a file, or a folder that is none of ours, takes; 0 when it is gone.

    Raises:
        OSError: it cannot be told.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return _folder_bytes(str(path)) if stat.S_ISDIR(status.st_mode) else _disk_bytes(status)


def _disk_bytes(status: os.stat_result) -> int:
    """What a file takes: no less than its length rounded up, even when some of it is not allocated yet."""
    return max(round_up(status.st_size), status.st_blocks * 512)


def _folder_bytes(path: str) -> int:
    total = 0
    for inner, _, names in os.walk(path):
        for name in names:
            try:
                total += _disk_bytes(os.lstat(os.path.join(inner, name)))
            except OSError:
                continue
    return total


def is_unlinked(path: Path) -> bool:
    """Remove a file; False when the file system refuses. One that is not there is removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
