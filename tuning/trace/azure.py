"""Azure's CSV: absolute times to 100 ns, lengths, and nothing on what is shared.

Published with Patel et al., "Splitwise" (ISCA 2024). The files of 2024 have the same columns, with a time zone.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final, TextIO

import numpy as np

from tuning.trace import row_values
from tuning.trace.errors import RowError
from tuning.trace.raw_rows import RowBuilder
from tuning.trace.trace import Trace

HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
TICKS_PER_S: Final = 10_000_000

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
# datetime keeps six digits of a second, so the fraction is read apart.
_TIME: Final = re.compile(
    r"((?:19|20|21)\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)
_NUMBER: Final = re.compile(r"-?\d{1,18}", re.ASCII)


def parse(line: int, text: str, rows: RowBuilder) -> None:
    """Add a row to `rows`.

    Raises:
        RowError: it is no row of this format; nothing was added.
    """
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3:
        raise RowError("wrong number of columns", f"found {len(cells)} columns: there must be 3, {HEADER}")
    ticks = _ticks(cells[0])
    lengths = {"ContextTokens": _number(cells[1]), "GeneratedTokens": _number(cells[2])}
    input_tokens = row_values.integer(lengths, "ContextTokens", 1, row_values.MAX_TOKENS)
    output_tokens = row_values.integer(lengths, "GeneratedTokens", 0, row_values.MAX_TOKENS)
    rows.add(line, ticks, input_tokens, output_tokens)


def write(trace: Trace, file: TextIO) -> None:
    """Write all rows, as if the first came with the year 1970. Blocks, sessions and kinds have no place here."""
    file.write(HEADER + "\n")
    ticks = np.rint(trace.arrival_s * TICKS_PER_S).astype(np.int64).tolist()
    for tick, input_tokens, output_tokens in zip(
        ticks, trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
    ):
        second, fraction = divmod(tick, TICKS_PER_S)
        moment = _EPOCH + timedelta(seconds=second)
        file.write(f"{moment:%Y-%m-%d %H:%M:%S}.{fraction:07d},{input_tokens},{output_tokens}\n")


def _number(cell: str) -> int | str:
    return int(cell) if _NUMBER.fullmatch(cell) else cell


def _ticks(text: str) -> int:
    """Ticks since 1970. A time without a zone is taken for UTC: only differences count."""
    match = _TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError("not in the form 2023-11-16 18:15:46.6805900")
        moment = datetime.fromisoformat(match[1] + (match[3] or "+00:00"))
    except ValueError as error:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise RowError("TIMESTAMP is not allowed", f"TIMESTAMP is {shown!r}: {error}") from error
    since = moment - _EPOCH
    fraction = int((match[2] or "").ljust(9, "0")[:7])
    return (since.days * 86_400 + since.seconds) * TICKS_PER_S + fraction
