"""One time-to-live for all groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuning.ttl.curves import ReuseCurve, total_block_s


def uniform_ttl_s(curves: Sequence[ReuseCurve], budget_block_s: float) -> float:
    """The best single TTL within a budget, exactly: both hits and storage grow with it, so it is the longest that fits.

    Args:
        budget_block_s: block-seconds, 0 or more.

    Returns:
        A re-use interval of some group, or 0.
    """
    choices_s = np.unique(np.concatenate([curve.choices_s for curve in curves]))
    fits, breaks = 0, len(choices_s)  # the first is 0, which costs nothing
    while breaks - fits > 1:
        middle = (fits + breaks) // 2
        if total_block_s(curves, [float(choices_s[middle])] * len(curves)) <= budget_block_s:
            fits = middle
        else:
            breaks = middle
    return float(choices_s[fits])
