"""Which blocks are used again, and after how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuning.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class IdealHits:
    """What a cache that never forgets would answer, counted by prefix, requests in the order of the trace."""

    blocks: int
    """All blocks of all prompts."""
    hits: int
    """Those that an earlier request had with all before them."""
    full_block_hits: int
    """The same when a partial last block is never one: it has no KV that another prompt could go on from."""

    @property
    def ratio(self) -> float:
        return self.hits / self.blocks

    @property
    def full_block_ratio(self) -> float:
        """Of all blocks too, so the difference from `ratio` is what partial blocks make."""
        return self.full_block_hits / self.blocks


def ideal_hits(trace: Trace) -> IdealHits:
    """Count them in a trace with reuse information."""
    full = np.ones(len(trace.block_ids), dtype=np.bool_)
    full[trace.block_offsets[1:][trace.last_is_partial] - 1] = False
    full_ids = trace.block_ids[full]
    num_full_ids = int(np.count_nonzero(np.bincount(full_ids, minlength=1)))
    blocks = len(trace.block_ids)
    return IdealHits(blocks, blocks - trace.num_ids, len(full_ids) - num_full_ids)


def next_uses_s(trace: Trace) -> NDArray[np.float64]:
    """[blocks] When the block of each use is used next; infinite at the last. The caller owns it."""
    ids = trace.block_ids
    used_s = _used_s(trace)
    order = np.argsort(ids, kind="stable")
    again = np.diff(ids[order]) == 0
    next_s = np.full(len(ids), np.inf)
    next_s[order[:-1][again]] = used_s[order[1:][again]]
    return next_s


def gaps_s(trace: Trace) -> NDArray[np.float64]:
    """[blocks] Seconds from each use of a block to its next; infinite at the last. The caller owns it."""
    return next_uses_s(trace) - _used_s(trace)


def working_set(
    trace: Trace, next_uses_s: NDArray[np.float64], at_s: Sequence[float], window_s: float
) -> NDArray[np.int64]:
    """[len(at_s)] Different blocks used within the `window_s` before each time, its own moment included.

    After Denning, "The working set model for program behavior" (1968).

    Args:
        trace: one with reuse information.
        next_uses_s: its own.
        at_s: times.
        window_s: length of the window; infinite for all that was used so far.
    """
    used_s = _used_s(trace)
    # A use keeps its block in the set until the window has passed or the next use takes over, at that very moment.
    left_s = np.sort(np.minimum(next_uses_s, used_s + window_s))
    came: NDArray[np.int64] = np.searchsorted(used_s, at_s, side="right")
    return came - np.searchsorted(left_s, at_s, side="right")


def _used_s(trace: Trace) -> NDArray[np.float64]:
    """[blocks]"""
    return np.repeat(trace.arrival_s, np.diff(trace.block_offsets))
