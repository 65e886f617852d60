"""Blocks of a trace by their keys in the live store, where a server recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tuning.trace.trace import Trace

KEY_BYTES = 32


def live_keys(path: Path, trace: Trace, blocks: Sequence[int]) -> tuple[bytes, ...] | None:
    """Keys of some blocks, from our own Parquet.

    Args:
        path: the file that `trace` was read from, strictly: each row is a request.
        blocks: block ids of `trace`.

    Returns:
        None where the file's hashes are none of the live store's keys, as in a converted trace.

    Raises:
        ValueError: the file is not the one of this trace.
    """
    with path.open("rb") as file:  # of a name pyarrow makes an address
        table = pq.read_table(file, columns=["arrival_s", "block_hashes"])
    if table.num_rows != len(trace):
        raise ValueError(f"{path} has {table.num_rows} rows, the trace {len(trace)} requests: give the file it is from")
    hashes = table.column("block_hashes")
    if hashes.type.value_type != pa.binary(KEY_BYTES):
        return None
    # Requests come in the order of arrival, those of equal times as in the file.
    rows = np.argsort(table.column("arrival_s").to_numpy(), kind="stable")
    _, first_use = np.unique(trace.block_ids, return_index=True)
    keys: list[bytes] = []
    for block in blocks:
        use = int(first_use[block])
        request = int(np.searchsorted(trace.block_offsets, use, "right")) - 1
        keys.append(hashes[int(rows[request])][use - int(trace.block_offsets[request])].as_py())
    return tuple(keys)
