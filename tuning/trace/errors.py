"""What goes wrong with a trace, and whose fault it is."""

from __future__ import annotations


class TraceError(ValueError):
    """The content of a trace file is refused. The message says where, what was found, and what is allowed."""


class TraceFileError(TraceError):
    """A file cannot be opened or written: it is not there, is a folder, may not be read."""


class TraceUsageError(TraceError):
    """What was asked for does not fit the file or makes no sense."""


class RowError(Exception):
    """A row of a file is refused.

    Args:
        reason: the same for all rows with this trouble; reports count by it.
        message: what was given and what is allowed, without the line.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
