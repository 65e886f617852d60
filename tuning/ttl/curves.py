"""Hits and storage of a group of blocks, as functions of its time-to-live."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuning.ttl.uses import BlockUses


class ReuseCurve:
    """What a group of blocks gains and takes when each of them is kept for `ttl_s` after every use.

    `H(t) = |{d <= t}|` hits and `C(t) = |B| t + sum of min(t, d)` block-seconds, over the re-use intervals d and the
    blocks B of the group (Kareto, arXiv 2603.08739). Between two uses a block takes the interval, or the TTL where that
    is shorter; the term |B| t is for the last use of each block, after which it stays for the whole TTL, also where the
    trace ends before. C is continuous, concave and piecewise linear; H is a step function, so only re-use intervals,
    and 0, are worth choosing.

    Args:
        intervals_s: re-use intervals in any order, finite, 0 or more.
        num_blocks: different blocks that were used, 0 or more; 0 goes with no intervals.

    Raises:
        ValueError: an argument is not as described.
    """

    def __init__(self, intervals_s: NDArray[np.float64], num_blocks: int) -> None:
        ordered = np.sort(np.asarray(intervals_s, np.float64))
        if len(ordered) and not (ordered[0] >= 0 and ordered[-1] < math.inf):
            raise ValueError("a re-use interval is not finite or below 0: give seconds from one use to the next")
        if num_blocks < 0 or (num_blocks == 0 and len(ordered)):
            raise ValueError(f"num_blocks={num_blocks} is not allowed with {len(ordered)} re-use intervals")
        self.num_blocks = num_blocks
        self.intervals_s = ordered
        """Rising. Do not write into it, nor into the next three."""
        self._sums_s = np.concatenate((np.zeros(1), np.cumsum(ordered)))
        self.choices_s = np.unique(np.concatenate((np.zeros(1), ordered)))
        """TTLs worth choosing: 0 and the different intervals, rising."""
        self.choice_hits = np.searchsorted(ordered, self.choices_s, "right")
        """H of each choice."""
        rest = len(ordered) - self.choice_hits
        self.choice_block_s = (num_blocks + rest) * self.choices_s + self._sums_s[self.choice_hits]
        """C of each choice, computed as `block_s` does."""

    def hits(self, ttl_s: float) -> int:
        """H: uses that find their block."""
        return int(np.searchsorted(self.intervals_s, ttl_s, "right"))

    def block_s(self, ttl_s: float) -> float:
        """C: block-seconds of residence, for a TTL of 0 or more."""
        hits = self.hits(ttl_s)
        return float((self.num_blocks + len(self.intervals_s) - hits) * ttl_s + self._sums_s[hits])

    def choice_at_most(self, ttl_s: float) -> int:
        """Index of the last choice that is not above `ttl_s`: the same hits for no more storage. 0 for one below 0."""
        return max(int(np.searchsorted(self.choices_s, ttl_s, "right")) - 1, 0)

    def envelope(self) -> NDArray[np.int64]:
        """Choices at the corners of the least concave function above the points (C, H), rising; the first is 0.

        From corner to corner the return, hits per block-second, falls.
        """
        corners: list[int] = []
        block_s, hits = self.choice_block_s.tolist(), self.choice_hits.tolist()
        for choice in range(len(hits)):
            while len(corners) >= 2:
                first, last = corners[-2], corners[-1]
                rise = (hits[last] - hits[first]) * (block_s[choice] - block_s[first])
                if rise > (hits[choice] - hits[first]) * (block_s[last] - block_s[first]):
                    break
                corners.pop()
            corners.append(choice)
        return np.array(corners, np.int64)


def reuse_curves(uses: BlockUses, group_of_block: NDArray[np.int32], num_groups: int) -> tuple[ReuseCurve, ...]:
    """The curves of all groups, by group number.

    Args:
        group_of_block: as of `tuning.ttl.groups.group_of_block`, for the same trace.
        num_groups: with the rest, so one more than there are roots.
    """
    groups = group_of_block[uses.block_ids]
    first = np.isinf(uses.interval_s)
    blocks = np.bincount(groups[first], minlength=num_groups)
    order = np.argsort(groups[~first], kind="stable")
    intervals_s = uses.interval_s[~first][order]
    ends = np.cumsum(np.bincount(groups[~first], minlength=num_groups))
    return tuple(
        ReuseCurve(part, int(count)) for part, count in zip(np.split(intervals_s, ends[:-1]), blocks, strict=True)
    )


def least_useful_block_s(curves: Sequence[ReuseCurve]) -> float | None:
    """Block-seconds of the cheapest TTL above 0 that gives a group a hit; None where no block is used again later."""
    steps = [float(curve.choice_block_s[1]) for curve in curves if len(curve.choices_s) > 1]
    return min(steps, default=None)


def total_block_s(curves: Sequence[ReuseCurve], ttls_s: Sequence[float]) -> float:
    """Block-seconds of all groups, each with its TTL."""
    return math.fsum(curve.block_s(ttl_s) for curve, ttl_s in zip(curves, ttls_s, strict=True))
