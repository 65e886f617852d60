"""The formats by name, and which of them a file is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TextIO

from tuning.trace import azure, bailian, mooncake
from tuning.trace.errors import TraceError
from tuning.trace.raw_rows import RowBuilder
from tuning.trace.trace import Trace

PARQUET: Final = "parquet"


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A format with one request a line."""

    ticks_per_s: int
    clock_type: Literal["q", "d"]
    """As of `RowBuilder`."""
    usual_block_tokens: int | None
    """None for a format that has no blocks."""
    header: str | None
    """First line, which is no request; None for a format without."""
    parse: Callable[[int, str, RowBuilder], None]
    """(number of the line, the line, where to add the row). Raises RowError, and adds nothing then."""
    write: Callable[[Trace, TextIO], None]
    prefix_hashes: bool = False
    """Whether it is said to have hashes of prefixes, not of content."""
    sessions: bool = False
    """Whether it knows turns and kinds."""


TEXT_FORMATS: Final[dict[str, TextFormat]] = {
    "mooncake": TextFormat(mooncake.TICKS_PER_S, "d", 512, None, mooncake.parse, mooncake.write, prefix_hashes=True),
    "bailian": TextFormat(bailian.TICKS_PER_S, "d", 16, None, bailian.parse, bailian.write, sessions=True),
    "azure": TextFormat(azure.TICKS_PER_S, "q", None, azure.HEADER, azure.parse, azure.write),
}
NAMES: Final = (*TEXT_FORMATS, PARQUET)


def looks_like_bailian(first_line: bytes) -> bool:
    """Whether a JSON line is a row of Bailian's rather than of Mooncake's."""
    return b'"chat_id"' in first_line


def recognise(first_line: bytes) -> str:
    """The text format whose file begins with this line.

    Raises:
        TraceError: none does.
    """
    if first_line == azure.HEADER.encode():
        return "azure"
    if first_line.startswith(b"{"):
        # Rows of sessions have ids of their own; everything else in JSON lines is in Mooncake's form.
        return "bailian" if looks_like_bailian(first_line) else "mooncake"
    if first_line.startswith(b"version https://git-lfs"):
        raise TraceError("this is a pointer of Git LFS, not the trace itself: fetch the file with `git lfs pull`")
    shown = ascii(first_line[:60].decode(errors="replace"))
    raise TraceError(
        f"line 1 is {shown}: none of the formats begins so. JSON lines begin with an object, Azure's CSV "
        f"with {azure.HEADER}; say which it is (--format) if one of its first rows is broken"
    )
