"""How much of a stored prefix to fetch, and how much to compute again instead (ours).

Fetching a prefix of the match costs the transfer of its runs; what is not fetched is computed. Both are estimates from
rates that the caller measured. What follows the match is computed in any case and does not matter. Nor does the
quadratic part of attention: it makes long prefixes dearer to compute than is said here, so fetching is never chosen too
often because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kv.extents import Lookup
from kv.layout import KvLayout
from kv.tiers import Tier


@dataclass(frozen=True, slots=True)
class FetchRun:
    """Consecutive tokens of the request that lie in one extent. Runs follow each other."""

    num_tokens: int
    """That are wanted of it."""
    num_bytes: int
    """Of the whole extent, which is moved for any of its tokens."""
    tier: Tier


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What fetching and computing take on one worker. All rates are finite and above zero."""

    bytes_per_s: Mapping[Tier, float]
    s_per_extent: float
    """For each run, beside its bytes."""
    prefill_tokens_per_s: float

    def fetch_s(self, run: FetchRun) -> float:
        """Seconds to bring a run in."""
        return self.s_per_extent + run.num_bytes / self.bytes_per_s[run.tier]

    def compute_s(self, run: FetchRun) -> float:
        """Seconds to compute a run's tokens."""
        return run.num_tokens / self.prefill_tokens_per_s


def tokens_to_fetch(runs: Iterable[FetchRun], costs: FetchCosts) -> int:
    """Leading tokens whose fetch, with the computation of the rest, takes the least time; the most of them among
    equals.

    Only ends of runs come into question: an extent is moved whole, so its last token comes for nothing.
    """
    chosen = num_tokens = 0
    saved_s = most_saved_s = 0.0
    for run in runs:
        num_tokens += run.num_tokens
        saved_s += costs.compute_s(run) - costs.fetch_s(run)
        if saved_s >= most_saved_s:
            chosen, most_saved_s = num_tokens, saved_s
    return chosen


def tokens_that_may_pay(runs: Sequence[FetchRun], costs: FetchCosts) -> int:
    """Leading tokens beyond which nothing is worth its fetch, however many of the first runs the reader turns out to
    have already: up to the last run that takes no longer to fetch than to compute."""
    for stop in range(len(runs), 0, -1):
        if costs.fetch_s(runs[stop - 1]) <= costs.compute_s(runs[stop - 1]):
            return sum(run.num_tokens for run in runs[:stop])
    return 0


def may_compute_meanwhile(elapsed_s: float, arrived_layers: int, num_layers: int, compute_s: float) -> bool:
    """Whether computing may begin with the layers that have arrived, so that the others arrive before they are needed
    (ours).

    With times of f to fetch a layer and c to compute one, of L layers, any arrived layer will do when f <= c. When
    f > c the last layer is the latest: it is needed after L - 1 layers were computed, so the layers that are missing
    may take (L - 1) c.

    Args:
        elapsed_s: since the fetch began; layers take the same time each.
        arrived_layers: above zero.
        compute_s: what computing takes, all layers together.
    """
    missing_s = elapsed_s * (num_layers - arrived_layers) / arrived_layers
    return missing_s <= compute_s * (num_layers - 1) / num_layers


def runs_of(lookup: Lookup, layout: KvLayout, first_block: int = 0) -> list[FetchRun]:
    """The runs of what was found, from block `first_block` of the request on."""
    runs = []
    stop = lookup.first_block
    for piece in lookup.slices:
        stop += piece.count
        wanted_blocks = min(piece.count, stop - first_block)
        if wanted_blocks > 0:
            num_bytes = sum(part.range.num_bytes(layout) for part in piece.parts)
            runs.append(FetchRun(wanted_blocks * layout.block_tokens, num_bytes, piece.tier))
    return runs
