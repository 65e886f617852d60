"""Errors of the KV store. A reader turns each of them into a miss, never into wrong tokens."""

from __future__ import annotations


class KvError(Exception):
    """Base of the errors that this package raises on purpose."""


class PartError(KvError):
    """A part that must not be used: missing, damaged, cut short, foreign or written by another format version.

    `reason` is one short word for a metric label: type, truncated, magic, version, header, checksum, size, dtype,
    layout, fingerprint, range, keys or tokens; gone or lanes when parts of a block are missing altogether; unreadable
    when the operating system refuses to read the file it is in. `detail` is for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"KV part refused ({self.reason}): {self.detail}"


class PartUnavailableError(KvError):
    """A part that is stored but cannot be had now, for a reason that may pass. Nobody reports it as broken."""


class DiskTierError(KvError):
    """A folder that cannot be used as a disk tier. The message says which, why, and what to do."""


class DiskWriteError(KvError):
    """The file system refused to change a disk tier. What was to be stored is not; a reader sees nothing of it.

    `reason` is one short word for a metric label: disk_full, disk_read_only, disk_io, disk_lost, disk_blocked,
    closed or disk_error. `detail` is for people.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"KV not written to disk ({self.reason}): {self.detail}"
