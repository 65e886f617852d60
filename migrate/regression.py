"""Least squares over sums that can be added, subtracted and faded: what is fitted later is chosen then.

Whoever measures adds a few products and keeps no samples. The sums of one span are the difference of two looks at them,
and those of several measurers add up.
"""

from __future__ import annotations

from itertools import combinations, combinations_with_replacement

import numpy as np


class Regression:
    """Sums of products over samples of inputs and an output: `output = w[0] + w[1] * inputs[0] + ...` is fitted."""

    __slots__ = ("_num_terms", "_sums")

    def __init__(self, num_inputs: int) -> None:
        self._num_terms = num_inputs + 1
        size = self._num_terms + 1
        self._sums = [0.0] * (size * (size + 1) // 2)

    @property
    def count(self) -> float:
        """Samples; a fraction once they have been faded."""
        return self._sums[0]

    def mean(self, term: int) -> float:
        """Mean of what `w[term]` is multiplied by; 0 without samples."""
        return self._sums[term] / self.count if self.count else 0.0

    def mean_product(self, one: int, other: int) -> float:
        """Mean of the product of what `w[one]` and `w[other]` are multiplied by, `one` the first; 0 without samples."""
        size = self._num_terms + 1
        place = one * size - one * (one - 1) // 2 + other - one
        return self._sums[place] / self.count if self.count else 0.0

    def add(self, *inputs: float, output: float) -> None:
        """One sample."""
        row = (1.0, *inputs, output)
        self._sums = [
            total + one * other
            for total, (one, other) in zip(self._sums, combinations_with_replacement(row, 2), strict=True)
        ]

    def plus(self, other: Regression, factor: float = 1.0) -> Regression:
        """These sums with `factor` times the other's: -1 takes samples away that both have."""
        sums = Regression(self._num_terms - 1)
        sums._sums = [one + factor * two for one, two in zip(self._sums, other._sums, strict=True)]
        return sums

    def scaled(self, factor: float) -> Regression:
        """As if there had been `factor` times as many of each sample."""
        sums = Regression(self._num_terms - 1)
        sums._sums = [factor * total for total in self._sums]
        return sums

    def fit(self) -> tuple[float, ...]:
        """Weights of 0 or more with the least squared error, exactly: the best of those that each choice of inputs
        has. Inputs that always go together share what they cost. All 0 without samples."""
        size = self._num_terms + 1
        products = np.zeros((size, size))
        products[np.triu_indices(size)] = self._sums
        products = np.triu(products) + np.triu(products, 1).T
        # All inputs to the same scale, so that none is taken for nothing since it is small.
        scale = np.sqrt(np.clip(np.diag(products)[:-1], 0.0, None))
        used = [term for term in range(self._num_terms) if scale[term] > 0]
        inputs = products[:-1, :-1] / np.outer(scale, scale).clip(1e-300)
        output = products[:-1, -1] / scale.clip(1e-300)
        best, least = np.zeros(self._num_terms), 0.0
        for count in range(len(used), 0, -1):  # of equal fits the one that blames no single input
            for chosen in map(list, combinations(used, count)):
                weights = np.linalg.lstsq(inputs[np.ix_(chosen, chosen)], output[chosen], rcond=1e-9)[0]
                if (weights < 0).any():
                    continue
                # Squared error, less that of weights of 0.
                error = float(weights @ inputs[np.ix_(chosen, chosen)] @ weights - 2 * weights @ output[chosen])
                if error < least - 1e-12 * abs(least):
                    best, least = np.zeros(self._num_terms), error
                    best[chosen] = weights / scale[chosen]
        return tuple(float(weight) for weight in best)
