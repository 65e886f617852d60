"""Whether a series of samples grows: the Theil-Sen slope with Sen's interval.

Theil (1950) and Sen, "Estimates of the Regression Coefficient Based on Kendall's Tau" (1968,
https://doi.org/10.1080/01621459.1968.10480934). Memory grows in steps and has outliers, which a least-squares line
follows and a median of slopes does not.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

MIN_SAMPLES = 4
_MAX_SAMPLES = 400
"""The number of pairs is quadratic; longer series are thinned out to about this many."""
_NORMAL_QUANTILE_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope in units of the values per second, with a 95 % interval."""

    samples: int
    slope_per_s: float
    low_per_s: float
    high_per_s: float

    @property
    def grows(self) -> bool:
        """Whether the whole interval lies above zero."""
        return self.low_per_s > 0.0


def second_half(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The samples (time, value) from the middle of the covered time on: what comes before is warm-up."""
    if not samples:
        return []
    middle_s = (samples[0][0] + samples[-1][0]) / 2
    return [sample for sample in samples if sample[0] >= middle_s]


def trend(samples: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of samples (time in seconds, value), in order of time. None for fewer than `MIN_SAMPLES` of them.

    The interval's ranks come from the variance of Kendall's S without ties, n(n-1)(2n+5)/18, in the normal
    approximation, and are clipped to the smallest and largest slope. It supposes independent samples.
    """
    thinned = samples[:: max(1, math.ceil(len(samples) / _MAX_SAMPLES))]
    count = len(thinned)
    slopes = sorted(
        (value - earlier_value) / (time_s - earlier_s)
        for (earlier_s, earlier_value), (time_s, value) in combinations(thinned, 2)
        if time_s > earlier_s
    )
    if count < MIN_SAMPLES or not slopes:
        return None
    half_width = _NORMAL_QUANTILE_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18) / 2
    # Sen's ranks M1 = (N - C) / 2 and M2 + 1 = (N + C) / 2 + 1 count from one; both are rounded outwards.
    low_rank = math.floor(len(slopes) / 2 - half_width) - 1
    high_rank = math.ceil(len(slopes) / 2 + half_width)
    return Trend(
        samples=count,
        slope_per_s=statistics.median(slopes),
        low_per_s=slopes[max(0, low_rank)],
        high_per_s=slopes[min(len(slopes) - 1, high_rank)],
    )
