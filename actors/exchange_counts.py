"""What a worker counts of its dealings with the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kv.fetch_choice import FetchRun
from kv.tiers import Tier


@dataclass(slots=True)
class ExchangeCounts:
    """Counts since the start."""

    lookups: int = 0
    """That were answered."""
    queried_tokens: int = 0
    found_tokens: Counter[Tier] = field(default_factory=Counter)
    """Of those queried."""
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    """Fetched for prompts of requests that began here."""
    declined_tokens: int = 0
    """Found, and not fetched because computing them is faster."""

    def looked_up(self, num_tokens: int, runs: Iterable[FetchRun]) -> None:
        """A look-up of so many tokens was answered with these runs."""
        self.lookups += 1
        self.queried_tokens += num_tokens
        for run in runs:
            self.found_tokens[run.tier] += run.num_tokens

    def fetched(self, runs: Iterable[FetchRun], num_tokens: int) -> None:
        """Of the runs, the first `num_tokens` tokens have come, for a prompt."""
        for run in runs:
            count = min(run.num_tokens, num_tokens)
            self.hit_tokens[run.tier] += count
            num_tokens -= count
