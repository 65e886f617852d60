"""How fast we want to be beside another server, load by load, and what a comparison says of it.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, Literal

from load_tests.comparison import Comparison
from load_tests.paired_ratio import paired_ratio
from load_tests.run_tables import markdown_table, number
from load_tests.workloads import ONE_AT_A_TIME

Verdict = Literal["met", "short", "behind", "not comparable", "not measured"]

_SAME_CHUNKS = 0.05


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound for the ratio of our figure to the other server's. A rate is to be at least `ratio` times the other's, a
    time at most."""

    workload: str
    figure: str
    ratio: float = 1.0

    @property
    def is_rate(self) -> bool:
        return self.figure.endswith("_per_s")

    def __str__(self) -> str:
        return f"{'at least' if self.is_rate else 'at most'} {self.ratio:g}"

    def verdict(self, ratio: float) -> Verdict:
        """met: within the bound; behind: worse than the other server; short: neither."""
        if ratio >= self.ratio if self.is_rate else ratio <= self.ratio:
            return "met"
        return "behind" if (ratio < 1.0 if self.is_rate else ratio > 1.0) else "short"


_THROUGHPUT = {"prefill-heavy": 1.05, "decode-heavy": 1.2, "balanced": 1.2, "shared-prefix": 1.2}

AIMS = (
    *(
        aim
        for workload, times in _THROUGHPUT.items()
        for aim in (
            Aim(workload, "output_tokens_per_s", times),
            Aim(workload, "ttft_p50_ms"),
            Aim(workload, "itl_p99_ms"),
        )
    ),
    Aim(ONE_AT_A_TIME, "tpot_mean_ms"),
    Aim(ONE_AT_A_TIME, "ttft_p50_ms"),
)


def verdicts(comparison: Comparison) -> tuple[str, list[dict[str, Any]]]:
    """Each aim for each of our modes beside the baseline, by the median of the pairs' ratios, for the loads that were
    run: as Markdown and as records. Latencies between chunks of different lengths are not compared."""
    baseline, *ours = comparison.modes
    workloads = {row["workload"] for row in comparison.rows}
    records: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for aim in AIMS:
        for mode in ours if aim.workload in workloads else ():
            pairs = comparison.pairs(aim.workload, aim.figure, mode)
            ratio = paired_ratio(pairs)
            verdict: Verdict = "not measured" if ratio is None else aim.verdict(ratio.median)
            if ratio is not None and aim.figure.startswith("itl_") and not _chunks_agree(comparison, aim, mode):
                verdict = "not comparable"
            record = {"workload": aim.workload, "figure": aim.figure, "mode": mode, "aim": str(aim), "verdict": verdict}
            values = [number(statistics.median(side)) for side in zip(*pairs, strict=True)] if pairs else ["-", "-"]
            records.append({**record, "ratio": None if ratio is None else ratio.as_record()})
            cells = ("-", "-", "-", "0") if ratio is None else ratio.cells()
            rows.append((aim.workload, aim.figure, mode, *values, *cells, str(aim), verdict))
    columns = (
        "workload",
        "figure",
        "mode",
        baseline,
        "ours",
        "ratio",
        "interval",
        "coverage",
        "pairs",
        "aim",
        "verdict",
    )
    return markdown_table(columns, rows), records


def _chunks_agree(comparison: Comparison, aim: Aim, mode: str) -> bool:
    """Whether both sides sent as many tokens in a chunk."""
    ratio = paired_ratio(comparison.pairs(aim.workload, "tokens_per_chunk", mode))
    return ratio is not None and abs(ratio.median - 1.0) <= _SAME_CHUNKS
