"""The statistics of a run, made from its request records after it ended. Each definition is in
`docs/metrics-of-load-tests.md`; this module is where it is computed.

Pure: no clock, no I/O. Seconds inside; `Summary.as_row` gives milliseconds, for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from load_tests.request_record import RequestRecord

Cell = int | float | str | None

_ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request must reach to count as served well (both limits, as in DistServe's SLO attainment)."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of `count` values; all None when there are none."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures."""

    requests: int
    failed: int
    aborted: int
    short: int
    prompt_tokens: int
    cached_prompt_tokens: int | None
    output_tokens: int
    chunks: int
    makespan_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    latency_s: Distribution
    lateness_s: Distribution
    slo_attained: int | None
    errors: tuple[str, ...]

    @property
    def tokens_per_chunk(self) -> float | None:
        """Above 1, the inter-token latencies are those of chunks of so many tokens."""
        return self.output_tokens / self.chunks if self.chunks else None

    def as_row(self) -> dict[str, Cell]:
        """One flat record, units in the names, rates per second of makespan."""
        row: dict[str, Cell] = {
            "requests": self.requests,
            "failed": self.failed,
            "aborted": self.aborted,
            "short": self.short,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "tokens_per_chunk": _rounded(self.tokens_per_chunk, 3),
            "makespan_s": _rounded(self.makespan_s, 3),
            "output_tokens_per_s": self._per_s(self.output_tokens),
            "total_tokens_per_s": self._per_s(self.prompt_tokens + self.output_tokens),
            "requests_per_s": self._per_s(self.requests - self.failed - self.aborted),
        }
        for name, distribution in (
            ("ttft", self.ttft_s),
            ("tpot", self.tpot_s),
            ("itl", self.itl_s),
            ("latency", self.latency_s),
            ("lateness", self.lateness_s),
        ):
            for statistic in ("mean", "p50", "p90", "p99"):
                value_s: float | None = getattr(distribution, statistic)
                row[f"{name}_{statistic}_ms"] = None if value_s is None else round(1e3 * value_s, 3)
        if self.slo_attained is not None:
            row["slo_attainment"] = _rounded(self.slo_attained / self.requests, 4) if self.requests else None
            row["goodput_requests_per_s"] = self._per_s(self.slo_attained)
        if self.errors:
            row["errors"] = "; ".join(self.errors)
        return row

    def _per_s(self, count: int) -> float | None:
        return _rounded(count / self.makespan_s, 3) if self.makespan_s > 0 else None


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of `ordered` lies, with linear interpolation between neighbours (numpy's
    default rule). `ordered` must be sorted; None when it is empty."""
    if not ordered:
        return None
    position = (len(ordered) - 1) * share
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float]) -> Distribution:
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered) if ordered else None,
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
    )


def ttft_s(record: RequestRecord) -> float | None:
    """Time to first token, from when the request was due."""
    return record.chunk_s[0] - record.scheduled_s if record.chunk_s else None


def tpot_s(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None for an answer of one token or in one chunk."""
    output_tokens = output_tokens_of(record)
    if output_tokens < 2 or len(record.chunk_s) < 2:
        return None
    return (record.chunk_s[-1] - record.chunk_s[0]) / (output_tokens - 1)


def output_tokens_of(record: RequestRecord) -> int:
    """The server's own count, or the number of chunks when it gave none."""
    return len(record.chunk_s) if record.output_tokens is None else record.output_tokens


def attains(record: RequestRecord, level: ServiceLevel) -> bool:
    """Whether a request was served within both limits. A failed one never is; an answer without a TPOT needs only
    its first token in time."""
    first_s, per_token_s = ttft_s(record), tpot_s(record)
    return (
        record.succeeded
        and first_s is not None
        and first_s <= level.ttft_s
        and (per_token_s is None or per_token_s <= level.tpot_s)
    )


def summarise(records: Sequence[RequestRecord], level: ServiceLevel | None = None) -> Summary:
    """The figures of one run. Latencies and tokens are those of the requests that succeeded; lateness and makespan
    are over all of them."""
    succeeded = [record for record in records if record.succeeded]
    cached = [record.cached_prompt_tokens for record in succeeded if record.cached_prompt_tokens is not None]
    return Summary(
        requests=len(records),
        failed=sum(record.error is not None for record in records),
        aborted=sum(record.aborted for record in records),
        short=sum(output_tokens_of(record) < record.wanted_output_tokens for record in succeeded),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in succeeded),
        cached_prompt_tokens=sum(cached) if cached else None,
        output_tokens=sum(map(output_tokens_of, succeeded)),
        chunks=sum(len(record.chunk_s) for record in succeeded),
        makespan_s=(
            max(record.ended_s for record in records) - min(record.scheduled_s for record in records)
            if records
            else 0.0
        ),
        ttft_s=distribution(value for record in succeeded if (value := ttft_s(record)) is not None),
        tpot_s=distribution(value for record in succeeded if (value := tpot_s(record)) is not None),
        itl_s=distribution(later - earlier for record in succeeded for earlier, later in pairwise(record.chunk_s)),
        latency_s=distribution(record.ended_s - record.scheduled_s for record in succeeded),
        lateness_s=distribution(record.sent_s - record.scheduled_s for record in records),
        slo_attained=None if level is None else sum(attains(record, level) for record in records),
        errors=tuple(sorted({record.error for record in records if record.error is not None})[:_ERRORS_SHOWN]),
    )


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
