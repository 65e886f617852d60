"""Mooncake's JSONL: milliseconds, and hashes of prefixes in blocks of 512 tokens.

Published with Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST 2025).
"""

from __future__ import annotations

import json
from typing import Final, TextIO

import numpy as np

from tuning.trace import row_values
from tuning.trace.raw_rows import RowBuilder
from tuning.trace.trace import Trace

TICKS_PER_S: Final = 1000


def parse(line: int, text: str, rows: RowBuilder) -> None:
    """Add a row to `rows`.

    Raises:
        RowError: it is no row of this format; nothing was added.
    """
    row = row_values.json_object(text)
    clock_ms = row_values.clock(row, "timestamp", TICKS_PER_S)
    input_tokens = row_values.integer(row, "input_length", 1, row_values.MAX_TOKENS)
    output_tokens = row_values.integer(row, "output_length", 0, row_values.MAX_TOKENS)
    hashes = row_values.hashes(row, "hash_ids")
    rows.add(line, clock_ms, input_tokens, output_tokens)
    rows.add_hashes(hashes)


def write(trace: Trace, file: TextIO) -> None:
    """Write all rows. Times become whole milliseconds; sessions and kinds have no place here."""
    clock_ms = np.rint(trace.arrival_s * TICKS_PER_S).astype(np.int64).tolist()
    ends = trace.block_offsets[1:].tolist()
    start = 0
    for time_ms, input_tokens, output_tokens, end in zip(
        clock_ms, trace.input_tokens.tolist(), trace.output_tokens.tolist(), ends, strict=True
    ):
        row = {
            "timestamp": time_ms,
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": trace.block_ids[start:end].tolist(),
        }
        file.write(json.dumps(row) + "\n")
        start = end
