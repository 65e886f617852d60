"""What fetching and computing take on this worker, as it has measured: the figures behind `kv.fetch_choice`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from kv.fetch_choice import FetchCosts, FetchRun
from kv.tiers import TIERS, Tier
from migrate.load import RateEstimate

PRIOR_BYTES_PER_S: Final = 16e9
"""Faster than any of the tiers is, so that each is tried before it is judged."""
S_PER_EXTENT: Final = 50e-6
"""To find and unpack an extent, beside its bytes. Low for the same reason."""
HALF_LIFE_BYTES: Final = float(64 << 20)
DECLINED_SHARE: Final = 16
"""A byte that was not fetched because its tier was too slow says so much less than one that was fetched."""


class FetchRates:
    """One worker's. A rate for each tier, measured over whole fetches, and the worker's own rate of prefill.

    A tier that has become too slow is not fetched from, and would not be measured any more. So with every byte declined
    its estimate goes a little back to the prior, until it is tried again (ours).
    """

    def __init__(self, prefill_tokens_per_s: Callable[[], float], step_s: Callable[[], float]) -> None:
        """`prefill_tokens_per_s`: gives the present estimate, above zero. `step_s`: what a step of the engine takes, at
        least 0."""
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._step_s = step_s
        self._tiers: dict[Tier, RateEstimate] = {
            tier: RateEstimate(PRIOR_BYTES_PER_S, HALF_LIFE_BYTES) for tier in TIERS
        }

    def costs(self) -> FetchCosts:
        """As far as is known now."""
        return FetchCosts(self.bytes_per_s(), S_PER_EXTENT, self._prefill_tokens_per_s())

    def compute_s(self, num_tokens: int) -> float:
        """What computing so many tokens takes: no less than a step, which others share."""
        return max(num_tokens / self._prefill_tokens_per_s(), self._step_s())

    def bytes_per_s(self) -> dict[Tier, float]:
        """By tier."""
        return {tier: estimate.per_s for tier, estimate in self._tiers.items()}

    def fetched(self, runs: Iterable[FetchRun], seconds: float) -> None:
        """Takes in that these runs took `seconds` together, or more when their fetch was given up after so long.

        Runs of several tiers are fetched side by side, so their time is divided as the estimates so far would have it.
        What goes for extents as such is taken off first, but never more than nine tenths.
        """
        num_bytes: Counter[Tier] = Counter()
        num_runs = 0
        for run in runs:
            num_bytes[run.tier] += run.num_bytes
            num_runs += 1
        expected_s = {tier: amount / self._tiers[tier].per_s for tier, amount in num_bytes.items()}
        if not (total_s := sum(expected_s.values())):
            return
        moving_s = max(seconds - num_runs * S_PER_EXTENT, seconds / 10)
        for tier, amount in num_bytes.items():
            self._tiers[tier].update(amount, moving_s * expected_s[tier] / total_s)

    def declined(self, runs: Iterable[FetchRun]) -> None:
        """Takes in that these runs were not fetched, since computing them is faster."""
        for run in runs:
            amount = run.num_bytes // DECLINED_SHARE
            self._tiers[run.tier].update(amount, amount / PRIOR_BYTES_PER_S)
