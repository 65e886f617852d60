"""Smooth stand-ins for the curves of many groups, all evaluated at once, with their slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from tuning.ttl.curves import ReuseCurve

MOST_PIECES = 32


@dataclass(frozen=True, slots=True)
class SmoothValues:
    """By group, at one TTL each."""

    hits: NDArray[np.float64]
    hits_per_s: NDArray[np.float64]
    block_s: NDArray[np.float64]
    block_s_per_s: NDArray[np.float64]


class SmoothCurves:
    """Hits that rise smoothly where the exact ones jump, and the storage that goes with them. (ours)

    H is interpolated by monotone cubics (PCHIP) between a few re-use intervals at even steps of H, where it is exact.
    As the exact C has the slope |B| + |D| - H, the smooth one is the integral of that: the two fit each other, and so
    do their slopes.

    Args:
        curves: G of them, each with a re-use interval above 0.
    """

    def __init__(self, curves: Sequence[ReuseCurve]) -> None:
        self.longest_s = np.array([curve.choices_s[-1] for curve in curves])
        """[G] The longest re-use interval: there is nothing to gain beyond."""
        self._most_slope = np.array([curve.num_blocks + len(curve.intervals_s) for curve in curves], np.float64)
        self._starts_s = np.full((len(curves), MOST_PIECES), np.inf)
        self._cubics = np.zeros((4, len(curves), MOST_PIECES))
        self._integrals = np.zeros((len(curves), MOST_PIECES))
        for group, curve in enumerate(curves):
            hits = curve.choice_hits
            knots = np.unique(np.searchsorted(hits, np.linspace(hits[0], hits[-1], MOST_PIECES + 1)))
            pieces = len(knots) - 1
            smooth = PchipInterpolator(curve.choices_s[knots], hits[knots])
            self._starts_s[group, :pieces] = curve.choices_s[knots[:-1]]
            self._cubics[:, group, :pieces] = smooth.c
            self._integrals[group, :pieces] = smooth.antiderivative()(curve.choices_s[knots[:-1]])
        self._rows = np.arange(len(curves))

    def at(self, ttls_s: NDArray[np.float64]) -> SmoothValues:
        """Values and slopes, for TTLs [G] from 0 to `longest_s`."""
        piece = np.maximum((self._starts_s <= ttls_s[:, None]).sum(axis=1) - 1, 0)
        into_s = ttls_s - self._starts_s[self._rows, piece]
        a, b, c, d = self._cubics[:, self._rows, piece]
        hits = ((a * into_s + b) * into_s + c) * into_s + d
        integral = (
            self._integrals[self._rows, piece] + (((a / 4 * into_s + b / 3) * into_s + c / 2) * into_s + d) * into_s
        )
        return SmoothValues(
            hits=hits,
            hits_per_s=(3 * a * into_s + 2 * b) * into_s + c,
            block_s=self._most_slope * ttls_s - integral,
            block_s_per_s=self._most_slope - hits,
        )
