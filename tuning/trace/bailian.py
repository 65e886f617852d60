"""Qwen-Bailian's JSONL: seconds, turns of sessions, and hashes of content in blocks of 16 tokens.

Published with Wang et al., "KVCache Cache in the Wild" (USENIX ATC 2025). In some of its files an id is the hash of a
block's content, so that it can follow different predecessors; the reader of all formats makes prefixes of them.
"""

from __future__ import annotations

import json
from typing import Final, TextIO

import numpy as np

from tuning.trace import row_values
from tuning.trace.raw_rows import RowBuilder
from tuning.trace.trace import Trace

TICKS_PER_S: Final = 1
UNKNOWN_KIND: Final = "unknown"
"""Written as `type` where a trace has no kinds."""

_MAX_TURN: Final = 2**31 - 1


def parse(line: int, text: str, rows: RowBuilder) -> None:
    """Add a row to `rows`.

    Raises:
        RowError: it is no row of this format; nothing was added.
    """
    row = row_values.json_object(text)
    chat_id = row_values.integer(row, "chat_id", 0, row_values.MAX_ID)
    parent_chat_id = row_values.integer(row, "parent_chat_id", -1, row_values.MAX_ID)
    clock_s = row_values.clock(row, "timestamp", TICKS_PER_S)
    input_tokens = row_values.integer(row, "input_length", 1, row_values.MAX_TOKENS)
    output_tokens = row_values.integer(row, "output_length", 0, row_values.MAX_TOKENS)
    kind = row_values.text(row, "type")
    turn = row_values.integer(row, "turn", 1, _MAX_TURN)
    hashes = row_values.hashes(row, "hash_ids")
    rows.add(line, clock_s, input_tokens, output_tokens)
    rows.add_hashes(hashes)
    rows.add_session(chat_id, parent_chat_id, turn, kind)


def write(trace: Trace, file: TextIO) -> None:
    """Write all rows, named by their number from 0. Times keep three decimals, as in the published files."""
    clock_s = np.round(trace.arrival_s, 3).tolist()
    ends = trace.block_offsets[1:].tolist()
    start = 0
    for index, (time_s, end) in enumerate(zip(clock_s, ends, strict=True)):
        row = {
            "chat_id": index,
            "parent_chat_id": int(trace.parent_request[index]),
            "timestamp": time_s,
            "input_length": int(trace.input_tokens[index]),
            "output_length": int(trace.output_tokens[index]),
            "type": trace.kind[index] if trace.kind else UNKNOWN_KIND,
            "turn": int(trace.turn[index]),
            "hash_ids": trace.block_ids[start:end].tolist(),
        }
        file.write(json.dumps(row) + "\n")
        start = end
