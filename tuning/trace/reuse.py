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


def gaps_s(trace: Trace) -> NDArray[np.float64]:
    """[blocks] Seconds from each use of a block to its next; infinite at the last. The caller owns it."""
    ids = trace.block_ids
    used_s = np.repeat(trace.arrival_s, np.diff(trace.block_offsets))
    order = np.argsort(ids, kind="stable")
    again = np.diff(ids[order]) == 0
    gaps = np.full(len(ids), np.inf)
    gaps[order[:-1][again]] = np.diff(used_s[order])[again]
    return gaps


def working_set(trace: Trace, gaps: NDArray[np.float64], at_s: Sequence[float], window_s: float) -> NDArray[np.int64]:
    """[len(at_s)] Different blocks used within the `window_s` before each time, its own moment included.

    After Denning, "The working set model for program behavior" (1968).

    Args:
        trace: one with reuse information.
        gaps: its `gaps_s`.
        at_s: times.
        window_s: length of the window; infinite for all that was used so far.
    """
    used_s = np.repeat(trace.arrival_s, np.diff(trace.block_offsets))
    # A use keeps its block in the set until the window has passed or the next use takes over.
    left_s = np.sort(used_s + np.minimum(gaps, window_s))
    came: NDArray[np.int64] = np.searchsorted(used_s, at_s, side="right")
    return came - np.searchsorted(left_s, at_s, side="right")
