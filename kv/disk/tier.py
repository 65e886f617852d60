"""A node's disk tier: extents as files in one folder, never more bytes than its limit.

Plain blocking calls, to be made in threads, any number at a time. Which extents stay is not decided here: whoever owns
the tier asks for the `shortage`, removes what it can do without, reserves, and then writes.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kv.disk.extent_file import part_view, read_index, temporary_path, write_error, write_extent
from kv.disk.findings import FoundExtent, Problem, leftovers
from kv.disk.folder import FolderListing, bytes_at, extent_path, is_unlinked, list_folder
from kv.disk.folder_lock import is_held, take_over, unusable
from kv.disk.open_extent import OpenExtent
from kv.disk.preamble import file_bytes, round_up
from kv.disk.tier_room import TierRoom
from kv.errors import DiskWriteError, PartError


class DiskTier:
    """See the module. `open` makes one.

    What counts: every file in the folder, whoever put it there before the tier was opened, by what it takes on disk
    (its length rounded up to 4096; `recount` looks again), and what is reserved. The folders themselves do not (257 of
    4 KiB at most), nor do files that others put there later. A file that is removed while it is open counts no more,
    though the file system has its space back only when the last reader of it is done.

    After `close`, and in another process, nothing of it may be changed: reserving is refused, writing is a
    `DiskWriteError` (closed), removing and touching do nothing.
    """

    def __init__(self, folder: Path, limit_bytes: int, lock_fd: int, listing: FolderListing, problems: list[Problem]):
        now_s = time.time()
        self._folder = folder
        self._lock_fd = lock_fd
        self._problems = problems
        self._found = sorted(
            (replace(listed, last_use_s=min(listed.last_use_s, now_s)) for listed in listing.extents),
            key=lambda listed: listed.last_use_s,
        )
        self._removes_broken = False

        self._state = threading.Condition()
        self._files = {listed.extent_id: listed.disk_bytes for listed in listing.extents}
        others = {problem.path: problem.disk_bytes for problem in problems if not problem.is_removed}
        self._room = TierRoom(limit_bytes, sum(self._files.values()), others)
        self._being_written: set[str] = set()
        self._unwanted: set[str] = set()
        self._num_changing = 0
        self._is_closed = False

    @classmethod
    def open(cls, folder: Path, limit_bytes: int, *, remove_leftovers: bool) -> DiskTier:
        """Take over a folder, which is created if need be. It may hold what an earlier run left: see `scan`.

        Args:
            limit_bytes: the folder never takes more, except for what is there already: then `shortage(0)` is positive
                and nothing can be reserved until enough was removed.
            remove_leftovers: remove files of unfinished extents, broken extents (as `scan` comes upon them) and files
                of unknown names, all of it only within the sub-folders where the tier keeps extents. Otherwise they
                stay and count. What could not be read is never removed.

        Raises:
            ValueError: the limit is negative.
            DiskTierError: the folder cannot be used, or another store is using it.
        """
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes={limit_bytes} is not allowed: give at least 0")
        folder = folder.absolute()
        lock_fd = take_over(folder)
        try:
            listing = list_folder(folder)
            problems = leftovers(listing, remove=remove_leftovers)
        except OSError as error:
            os.close(lock_fd)
            raise unusable(folder, error) from error
        tier = cls(folder, limit_bytes, lock_fd, listing, problems)
        tier._removes_broken = remove_leftovers
        return tier

    @property
    def limit_bytes(self) -> int:
        """That in force: what was given, or less while it is held (`hold_limit`)."""
        with self._state:
            return self._room.limit_bytes

    @property
    def used_bytes(self) -> int:
        """Files and reservations."""
        with self._state:
            return self._room.used_bytes

    @property
    def other_bytes(self) -> int:
        """Those of `used_bytes` that are no extents, so that no eviction frees them."""
        with self._state:
            return self._room.other_bytes

    @property
    def num_extents(self) -> int:
        """Files with the name of an extent, those that `scan` has not looked at yet included."""
        with self._state:
            return len(self._files)

    @staticmethod
    def size_on_disk(part_bytes: Sequence[int]) -> int:
        """Bytes to reserve for an extent whose encoded parts have these sizes; at least one."""
        return round_up(file_bytes(part_bytes))

    def scan(self) -> Iterator[FoundExtent | Problem]:
        """What was in the folder when it was opened and is there still: problems, then extents, longest unused first.

        Reads the files' headers only, one file a step. It goes through what was listed at the opening, so that nothing
        written since is reported, and skips what was removed since; a file may be removed right after it was reported.
        """
        yield from self._problems
        for listed in self._found:
            with self._state:
                if self._is_closed:
                    return
                if listed.extent_id not in self._files:
                    continue
            path = extent_path(self._folder, listed.extent_id)
            try:
                index = read_index(path)
            except PartError as error:
                is_removed = False
                if error.reason == "gone" or (self._removes_broken and error.reason != "unreadable"):
                    is_removed = self.remove(listed.extent_id)
                if error.reason != "gone":
                    yield Problem(
                        path, listed.extent_id, error.reason, error.detail, listed.disk_bytes, is_removed=is_removed
                    )
            else:
                yield FoundExtent(listed.extent_id, index, listed.last_use_s)

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must be freed before `num_bytes` can be reserved; at most 0 when they can be now."""
        with self._state:
            return self._room.shortage(num_bytes)

    def reserve(self, num_bytes: int) -> bool:
        """Take bytes of the limit; False, and nothing taken, when there is no room."""
        with self._state:
            if self._is_closed or self._room.shortage(num_bytes) > 0:
                return False
            self._room.reserved_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Free reserved bytes that nothing was written for."""
        with self._state:
            self._room.reserved_bytes -= num_bytes

    def write(self, extent_id: str, parent: bytes | None, buffers: Sequence[Any]) -> None:
        """Store an extent with `size_on_disk` of reserved bytes, which are used up, or given back when it fails.

        Args:
            extent_id: 32 hexadecimal digits, lower case, not used before.
            parent: key of the block before the extent; None exactly when the extent begins its chain.
            buffers: the encoded parts, at least one.

        Raises:
            ValueError: the id is no id, or taken; less is reserved than the extent takes.
            PartError: these are not the parts of one extent.
            DiskWriteError: the file system refused, or the tier is closed or lost (disk_lost), or something else is
                in the place of the sub-folder (disk_blocked). Nothing is left of the
                extent.
        """
        path = extent_path(self._folder, extent_id)
        num_bytes = self.size_on_disk([len(part_view(buffer)) for buffer in buffers])
        with self._state:
            if self._is_closed:
                raise DiskWriteError("closed", f"{path}: the tier is closed")
            if extent_id in self._files or extent_id in self._being_written:
                self._room.reserved_bytes -= min(num_bytes, self._room.reserved_bytes)
                raise ValueError(f"extent id {extent_id} is taken: give a new one")
            if self._room.reserved_bytes < num_bytes:
                raise ValueError(f"{self._room.reserved_bytes} bytes are reserved: reserve the {num_bytes} first")
            self._being_written.add(extent_id)
            self._num_changing += 1
        is_written = False
        try:
            if not is_held(self._folder, self._lock_fd):
                raise DiskWriteError("disk_lost", f"{self._folder} has no longer the lock file that this store locked")
            _make_subfolder(path.parent)
            write_extent(path, parent, buffers)
            is_written = True
        finally:
            is_left_over = not is_written and os.path.lexists(temporary_path(path))
            with self._state:
                self._room.reserved_bytes -= num_bytes
                self._being_written.discard(extent_id)
                if is_written:
                    self._files[extent_id] = num_bytes
                    self._room.extent_bytes += num_bytes
                if is_left_over:
                    self._room.count_others({temporary_path(path): num_bytes})
                is_unwanted = extent_id in self._unwanted
                self._unwanted.discard(extent_id)
                self._changed()
        if is_unwanted:
            self.remove(extent_id)

    def open_extent(self, extent_id: str) -> OpenExtent:
        """The file of an extent, to be read. It is the caller's to close.

        Raises:
            ValueError: the id is no id.
            PartError: gone, or whatever is wrong with the file.
        """
        return OpenExtent(extent_path(self._folder, extent_id))

    def remove(self, extent_id: str) -> bool:
        """Delete an extent and free its bytes. Who has it open can read it; one being written goes when it is there.

        Returns:
            False when the file system refuses; then it stays and counts. An extent that is not here is no error.

        Raises:
            ValueError: the id is no id.
        """
        path = extent_path(self._folder, extent_id)
        with self._state:
            if extent_id in self._being_written:
                self._unwanted.add(extent_id)
                return True
            if self._is_closed or extent_id not in self._files:
                return True
            num_bytes = self._files.pop(extent_id)
            self._num_changing += 1
        is_removed = is_unlinked(path)
        with self._state:
            if is_removed:
                self._room.extent_bytes -= num_bytes
            else:
                self._files[extent_id] = num_bytes
            self._changed()
        return is_removed

    def is_file(self, extent_id: str) -> bool:
        """Whether a file lies in an extent's place. Others may have put a folder there, which cannot be removed either,
        and says nothing of the disk."""
        return os.path.isfile(extent_path(self._folder, extent_id))

    def recount(self) -> None:
        """Count anew what is no extent: others may have removed it, or written to it."""
        with self._state:
            paths = self._room.others()
        counted: dict[Path, int] = {}
        for path in paths:
            with suppress(OSError):
                counted[path] = bytes_at(path)
        with self._state:
            self._room.count_others(counted)

    def touch(self, extent_id: str) -> None:
        """Note on disk that an extent was used now, for the order after a restart. Best effort: no error.

        Raises:
            ValueError: the id is no id.
        """
        path = extent_path(self._folder, extent_id)
        with self._state:
            if extent_id not in self._files or self._is_closed:
                return
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)

    def is_lost(self) -> bool:
        """Whether the folder, or its lock file, was removed or replaced while it is open: it may be another store's
        now, so all that is left to do is to close the tier."""
        with self._state:
            return not self._is_closed and not is_held(self._folder, self._lock_fd)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit. A lower one may leave a positive `shortage(0)`; what is reserved stays so.

        Raises:
            ValueError: it is negative.
        """
        with self._state:
            self._room.set_limit(limit_bytes)

    def hold_limit(self) -> int:
        """The file system has no room below the limit: no more than what is used now, until `release_limit`. Returns
        that."""
        with self._state:
            self._room.hold_limit()
            return self._room.limit_bytes

    def release_limit(self) -> None:
        """The limit is again what was given."""
        with self._state:
            self._room.release_limit()

    def close(self) -> None:
        """Wait for what is being written or removed, and let go of the folder. A second call does nothing."""
        with self._state:
            if self._is_closed:
                return
            self._is_closed = True
            self._state.wait_for(lambda: self._num_changing == 0)
        os.close(self._lock_fd)

    def _changed(self) -> None:
        self._num_changing -= 1
        self._state.notify_all()


def _make_subfolder(path: Path) -> None:
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except OSError as error:
        raise write_error(error, path) from error
    if not is_folder:  # a link would lead out of the tier's folder
        raise DiskWriteError("disk_blocked", f"{path} is in the place of a folder of the disk tier: remove it")
