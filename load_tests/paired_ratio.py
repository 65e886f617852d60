"""How two modes compare over paired runs: the median of the pairs' ratios, with an interval.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WANTED_COVERAGE = 0.95
RATIO_COLUMNS = ("interval", "coverage", "pairs")
"""After the ratio's own, whose name says to what."""


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """`median` of `pairs` ratios; the true median lies in [low, high] with probability `coverage`."""

    pairs: int
    median: float
    low: float
    high: float
    coverage: float

    def cells(self) -> tuple[str, str, str, str]:
        """For a table whose last columns are the ratio's and `RATIO_COLUMNS`."""
        return (
            f"{self.median:.3f}",
            f"{self.low:.3f}-{self.high:.3f}",
            f"{100 * self.coverage:.0f} %",
            str(self.pairs),
        )

    def as_record(self) -> dict[str, float]:
        """Rounded, as it is saved."""
        return {
            "median": round(self.median, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "coverage": round(self.coverage, 4),
            "pairs": self.pairs,
        }


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> PairedRatio | None:
    """Compares pairs (baseline, other), each measured in the same round. None without a usable pair.

    The interval is the pair of order statistics of the ratios that is the narrowest with a coverage of at least 95 %
    for the median of any continuous distribution (the inverted sign test); with fewer than six pairs, the extremes.
    Pairs whose baseline is not positive have no ratio and are left out.
    """
    ratios = sorted(other / baseline for baseline, other in pairs if baseline > 0)
    if not ratios:
        return None
    rank = 1
    while rank + 1 <= (len(ratios) + 1) // 2 and _coverage(len(ratios), rank + 1) >= WANTED_COVERAGE:
        rank += 1
    return PairedRatio(
        pairs=len(ratios),
        median=statistics.median(ratios),
        low=ratios[rank - 1],
        high=ratios[-rank],
        coverage=_coverage(len(ratios), rank),
    )


def _coverage(count: int, rank: int) -> float:
    """P(r(rank) <= median <= r(count + 1 - rank)): not more than `count - rank` values lie on one side."""
    below = sum(math.comb(count, successes) for successes in range(rank))
    return max(0.0, 1.0 - 2.0 * below / 2.0**count)
