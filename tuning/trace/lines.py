"""The lines of a text file, packed with gzip or not, one at a time."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from tuning.trace.errors import TraceError, TraceFileError
from tuning.trace.report import ReadReport

MAX_LINE_BYTES: Final = 64 * 2**20
"""A million tokens in blocks of 16 take less than one."""

_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"


@contextmanager
def open_unpacked(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, unpacked where it begins as gzip does, whatever its name. Closed at the end of the block.

    Raises:
        TraceFileError: it cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be opened: {error.strerror}") from error
    with file:
        if file.peek(2)[:2] == _GZIP_MAGIC:
            # Without another buffer around it: that would lose what comes before an early end.
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        else:
            yield file


def numbered_lines(stream: BinaryIO, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and content of each line that is not blank, without a byte order mark and the line's end.

    Packed data that is broken or ends early is a problem in `report`, and the end: the line that could not be had.

    Raises:
        TraceError: a line is longer than `MAX_LINE_BYTES`.
    """
    number = 0
    try:
        while line := stream.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise TraceError(f"line {number} is longer than {MAX_LINE_BYTES} bytes: a trace has one request a line")
            if number == 1:
                line = line.removeprefix(_BOM)
            line = line.strip()
            if line:
                yield number, line
    except EOFError:
        report.add(number + 1, "cut short", "the gzip data ends before this line does: the file is not complete")
    except (gzip.BadGzipFile, zlib.error) as error:
        report.add(
            number + 1, "broken gzip data", f"the gzip data is broken before this line ends ({error}): fetch it again"
        )
