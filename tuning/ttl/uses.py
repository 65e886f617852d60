"""When the blocks of a trace are used, and how long after their last use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from tuning.trace.errors import TraceUsageError
from tuning.trace.trace import PartialBlocks, Trace


@dataclass(frozen=True, slots=True, eq=False)
class BlockUses:
    """All uses of a trace's blocks, request by request in the order of the trace. Do not write into the arrays."""

    num_ids: int
    """Of the trace. A block that only ever was a partial one may have no use."""
    horizon_s: float
    """From the first arrival to the last: no re-use interval is longer."""
    block_ids: NDArray[np.int64]
    """[M], of each use; those of request i are [request_offsets[i], request_offsets[i + 1])."""
    request_offsets: NDArray[np.int64]
    """[N + 1]"""
    used_s: NDArray[np.float64]
    """[M]: when, which is the arrival of its request."""
    interval_s: NDArray[np.float64]
    """[M]: since the use before; infinite at a block's first use."""
    next_interval_s: NDArray[np.float64]
    """[M]: to the next use; infinite at a block's last use."""


def block_uses(trace: Trace, partial_blocks: PartialBlocks = "hit") -> BlockUses:
    """The uses of a trace's blocks.

    Args:
        partial_blocks: "miss" leaves out the last block of a request where its tokens do not fill it: it is neither
            stored nor hit. "hit" treats it as any other block.

    Raises:
        TraceUsageError: the trace has no re-use information, or no use is left.
        ValueError: the option is no such word.
    """
    if partial_blocks not in get_args(PartialBlocks):
        raise ValueError(f"partial_blocks={partial_blocks!r} is not allowed: give one of {get_args(PartialBlocks)}")
    if not trace.has_reuse:
        raise TraceUsageError(f"{trace.name}: there are no block hashes in this trace, so nothing is known of re-use")
    counts = np.diff(trace.block_offsets)
    block_ids = trace.block_ids
    if partial_blocks == "miss":
        dropped = trace.last_is_partial & (counts > 0)
        kept = np.ones(len(block_ids), np.bool_)
        kept[trace.block_offsets[1:][dropped] - 1] = False
        block_ids = block_ids[kept]
        counts = counts - dropped
    if len(block_ids) == 0:
        raise TraceUsageError(
            f"{trace.name}: no prompt fills a block of {trace.block_tokens} tokens, so there is no re-use"
        )
    used_s = np.repeat(trace.arrival_s, counts)
    # Stable, so the uses of one block stay in the order of time.
    order = np.argsort(block_ids, kind="stable")
    again = block_ids[order[1:]] == block_ids[order[:-1]]
    before, after = order[:-1][again], order[1:][again]
    interval_s, next_interval_s = np.full(len(block_ids), np.inf), np.full(len(block_ids), np.inf)
    interval_s[after] = used_s[after] - used_s[before]
    next_interval_s[before] = interval_s[after]
    return BlockUses(
        num_ids=trace.num_ids,
        horizon_s=float(trace.arrival_s[-1]),
        block_ids=block_ids,
        request_offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))),
        used_s=used_s,
        interval_s=interval_s,
        next_interval_s=next_interval_s,
    )
