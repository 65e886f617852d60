"""What TTLs do to a trace when there is room for whatever has not expired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuning.ttl.uses import BlockUses


@dataclass(frozen=True, slots=True)
class Residence:
    """What is held from the arrival of some request to the last one's."""

    mean_blocks: float
    """0 where that is no time. The groups' curves say no less: they count the time after the last arrival too."""
    peak_blocks: int


def ttl_reuse_ratio(
    uses: BlockUses, group_of_block: NDArray[np.int32], ttls_s: Sequence[float | None], first_request: int = 0
) -> float:
    """Share of block uses that find their block and all blocks before it in their request.

    Exact, by prefix; so it can be less than the hits of the groups' curves, where a block outlives one before it that
    is of another group. In one group this cannot be: the block before was used whenever this one was.

    Args:
        group_of_block: as of `tuning.ttl.groups.group_of_block`, for the same trace.
        ttls_s: by group number; None for no limit. A block is there again after exactly its TTL.
        first_request: count this request and those after it, which use a block. The others have only filled the cache.
    """
    missing = np.isinf(uses.interval_s) | (uses.interval_s > _ttl_of_use(uses, group_of_block, ttls_s))
    missing_before = np.concatenate((np.zeros(1, np.int64), np.cumsum(missing)))
    at_start = np.repeat(missing_before[uses.request_offsets[:-1]], np.diff(uses.request_offsets))
    hit = missing_before[1:] == at_start
    counted = hit[uses.request_offsets[first_request] :]
    return float(np.count_nonzero(counted) / len(counted))


def residence(
    uses: BlockUses, group_of_block: NDArray[np.int32], ttls_s: Sequence[float | None], first_request: int = 0
) -> Residence:
    """How much is held from the arrival of `first_request` on, with arguments as of `ttl_reuse_ratio`."""
    ttl_s = _ttl_of_use(uses, group_of_block, ttls_s)
    used_again = np.isfinite(uses.next_interval_s) & (uses.next_interval_s <= ttl_s)
    left_s = np.minimum(uses.used_s + np.minimum(uses.next_interval_s, ttl_s), uses.horizon_s)
    came = np.arange(1, len(left_s) + 1)
    # A use hands its block over to the next; the last keeps it to the end of its TTL, that moment included.
    gone = np.searchsorted(np.sort(left_s[used_again]), uses.used_s, "right")
    gone += np.searchsorted(np.sort(left_s[~used_again]), uses.used_s, "left")
    first_use = uses.request_offsets[first_request]
    start_s = float(uses.used_s[first_use])
    window_s = uses.horizon_s - start_s
    block_s = float(np.maximum(left_s - np.maximum(uses.used_s, start_s), 0.0).sum())
    return Residence(block_s / window_s if window_s else 0.0, int((came - gone)[first_use:].max()))


def _ttl_of_use(
    uses: BlockUses, group_of_block: NDArray[np.int32], ttls_s: Sequence[float | None]
) -> NDArray[np.float64]:
    by_group = np.array([np.inf if ttl_s is None else ttl_s for ttl_s in ttls_s])
    of_use: NDArray[np.float64] = by_group[group_of_block[uses.block_ids]]
    return of_use
