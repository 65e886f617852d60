"""What is in a trace, in figures: for people, for programs (JSON), and for plots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tuning.trace.reuse import gaps_s, ideal_hits, next_uses_s, working_set
from tuning.trace.subtrees import Subtree, hottest_subtrees
from tuning.trace.trace import Trace

NUM_SUBTREES: Final = 10
WINDOWS_S: Final = (60.0, 600.0, 3600.0)
"""Windows of the working set, beside all that was used so far."""
NO_REUSE: Final = "no reuse information: the trace has no block hashes, so nothing can be said of hits"

_MAX_INTERVALS: Final = 120
_WIDTHS_S: Final = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400)
_QUANTILES: Final = (10, 50, 90, 99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or of answers."""

    mean: float
    p50: float
    p99: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Arrivals in intervals of equal length, the first of which begins at 0; the last need not be full."""

    interval_s: float
    requests_per_s: list[float]
    input_tokens_per_s: list[float]


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Different blocks used within a window, over time."""

    at_s: list[float]
    blocks_by_window_s: dict[str, list[int]]
    """By the length of the window in seconds; "all" is everything so far."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What prompts have in common."""

    block_tokens: int
    blocks: int
    different_blocks: int
    different_blocks_used_again: int
    ideal_hit_ratio: float
    """Of all blocks, by prefix, in a cache that never forgets."""
    ideal_hit_ratio_full_blocks: float
    """The same where partial last blocks are no hits."""
    ideal_hit_tokens_ratio: float
    """Tokens in full blocks that hit, of all prompt tokens."""
    reuse_interval_s: dict[str, float]
    """Seconds between two uses of a block: p10 to p99, and max. Empty where nothing is used again."""
    working_set: WorkingSet
    hottest_subtrees: list[Subtree]


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """All figures of a trace."""

    name: str
    requests: int
    span_s: float
    """From the first arrival to the last."""
    distinct_arrival_times: int
    requests_per_s: float | None
    """Mean; None for a span of 0."""
    follow_up_requests: int
    """Those whose previous turn is in the trace."""
    input_tokens: Lengths
    output_tokens: Lengths
    rates: Rates
    reuse: Reuse | None
    """None without reuse information."""

    def as_json(self) -> dict[str, Any]:
        """All of it in types of JSON, without NaN or infinities."""
        return asdict(self)


def describe(trace: Trace) -> TraceStatistics:
    """Compute the figures of a trace."""
    span_s = float(trace.arrival_s[-1])
    return TraceStatistics(
        name=trace.name,
        requests=len(trace),
        span_s=span_s,
        distinct_arrival_times=1 + int(np.count_nonzero(np.diff(trace.arrival_s))),
        requests_per_s=len(trace) / span_s if span_s > 0 else None,
        follow_up_requests=int(np.count_nonzero(trace.parent_request >= 0)),
        input_tokens=_lengths(trace.input_tokens),
        output_tokens=_lengths(trace.output_tokens),
        rates=_rates(trace),
        reuse=_reuse(trace, trace.block_tokens) if trace.block_tokens is not None else None,
    )


def text_lines(statistics: TraceStatistics) -> Iterator[str]:
    """The figures as text, without the courses over time."""
    one = statistics
    rate = "all at once" if one.requests_per_s is None else f"{one.requests_per_s:,.3f} requests/s in the mean"
    yield f"trace           {one.name}"
    yield f"requests        {one.requests:,}, of which {one.follow_up_requests:,} follow another"
    yield f"span            {one.span_s:,.3f} s; {rate}; {one.distinct_arrival_times:,} different times"
    busiest = max(one.rates.requests_per_s)
    yield f"busiest         {busiest:,.3f} requests/s over {one.rates.interval_s:,.0f} s"
    for label, lengths in (("input tokens", one.input_tokens), ("output tokens", one.output_tokens)):
        yield (
            f"{label:15} mean {lengths.mean:,.1f}, p50 {lengths.p50:,.0f}, p99 {lengths.p99:,.0f}, "
            f"{lengths.least:,} to {lengths.most:,}"
        )
    reuse = one.reuse
    if reuse is None:
        yield f"reuse           {NO_REUSE}"
        return
    yield (
        f"blocks          {reuse.blocks:,} of {reuse.block_tokens:,} tokens, {reuse.different_blocks:,} different, "
        f"{reuse.different_blocks_used_again:,} of them used again"
    )
    yield (
        f"ideal hits      {reuse.ideal_hit_ratio:.4f} of the blocks by prefix; without partial last blocks "
        f"{reuse.ideal_hit_ratio_full_blocks:.4f}, which are {reuse.ideal_hit_tokens_ratio:.4f} of the prompt tokens"
    )
    intervals = ", ".join(f"{name} {value:,.3f} s" for name, value in reuse.reuse_interval_s.items())
    yield f"used again      {'after ' + intervals if intervals else 'never'}"
    peaks = {name: max(blocks) for name, blocks in reuse.working_set.blocks_by_window_s.items()}
    largest = ", ".join(f"{blocks:,} blocks in {_window(name)}" for name, blocks in peaks.items())
    yield f"working set     at most {largest}"
    if reuse.hottest_subtrees:
        yield "hottest subtrees of prefixes (they may lie in one another):"
        yield f"{'root':>12} {'depth':>7} {'requests':>9} {'blocks':>9} {'hits':>9}  share of all hits"
    for tree in reuse.hottest_subtrees:
        share = tree.hits / (reuse.blocks - reuse.different_blocks)
        yield f"{tree.root:12} {tree.depth_blocks:7,} {tree.requests:9,} {tree.blocks:9,} {tree.hits:9,}  {share:.4f}"


def _window(name: str) -> str:
    return "all" if name == "all" else f"{float(name):,.0f} s"


def _lengths(tokens: NDArray[np.int64]) -> Lengths:
    p50, p99 = np.percentile(tokens, (50, 99)).tolist()
    return Lengths(float(tokens.mean()), p50, p99, int(tokens.min()), int(tokens.max()))


def _rates(trace: Trace) -> Rates:
    span_s = float(trace.arrival_s[-1])
    width_s = float(next((width for width in _WIDTHS_S if width * _MAX_INTERVALS >= span_s), math.ceil(span_s / 100)))
    interval = (trace.arrival_s // width_s).astype(np.int64)
    return Rates(
        interval_s=width_s,
        requests_per_s=(np.bincount(interval) / width_s).tolist(),
        input_tokens_per_s=(np.bincount(interval, weights=trace.input_tokens) / width_s).tolist(),
    )


def _reuse(trace: Trace, block_tokens: int) -> Reuse:
    hits = ideal_hits(trace)
    next_s, gaps = next_uses_s(trace), gaps_s(trace)
    intervals = gaps[np.isfinite(gaps)]
    quantiles = {}
    if len(intervals):
        names = (*(f"p{percent}" for percent in _QUANTILES), "max")
        quantiles = dict(zip(names, np.percentile(intervals, (*_QUANTILES, 100)).tolist(), strict=True))
    at_s = np.linspace(0, trace.arrival_s[-1], _MAX_INTERVALS + 1).tolist()
    sets = {f"{window_s:g}": working_set(trace, next_s, at_s, window_s).tolist() for window_s in WINDOWS_S}
    sets["all"] = working_set(trace, next_s, at_s, math.inf).tolist()
    return Reuse(
        block_tokens=block_tokens,
        blocks=hits.blocks,
        different_blocks=trace.num_ids,
        different_blocks_used_again=int(np.count_nonzero(np.bincount(trace.block_ids) > 1)),
        ideal_hit_ratio=hits.ratio,
        ideal_hit_ratio_full_blocks=hits.full_block_ratio,
        ideal_hit_tokens_ratio=hits.full_block_hits * block_tokens / int(trace.input_tokens.sum()),
        reuse_interval_s=quantiles,
        working_set=WorkingSet(at_s, sets),
        hottest_subtrees=hottest_subtrees(trace, NUM_SUBTREES),
    )
