"""Runs as Markdown tables: medians with the smallest and largest value.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

FIGURES = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_mean_ms",
    "tpot_p99_ms",
    "itl_p99_ms",
    "makespan_s",
)
"""What is shown of every run. All else is in the JSON."""

FIGURES_IF_KNOWN = (
    "slo_attainment",
    "goodput_requests_per_s",
    "server_cpu_ms_per_output_token",
    "cached_prompt_tokens",
    "prefill_computed_tokens",
    "prefill_fetched_tokens",
    "busiest_to_mean_tokens",
    "busiest_to_mean_busy",
)
"""Shown too when a run has them."""


def shown_figures(rows: Iterable[dict[str, Any]]) -> list[str]:
    rows = list(rows)
    return [*FIGURES, *(figure for figure in FIGURES_IF_KNOWN if any(row.get(figure) is not None for row in rows))]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines.extend("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return "\n".join(lines)


def medians(rows: Sequence[dict[str, Any]], by: Sequence[str] = ("workload",)) -> list[dict[str, Any]]:
    """One record per group of runs: the group's keys, the number of runs, and for each shown figure its median,
    smallest and largest value (left out when no run has it)."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    records = []
    for key, group in groups.items():
        record: dict[str, Any] = {**dict(zip(by, key, strict=True)), "runs": len(group)}
        for figure in shown_figures(group):
            values = [row[figure] for row in group if row.get(figure) is not None]
            if values:
                record[figure] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        records.append(record)
    return records


def median_table(rows: Sequence[dict[str, Any]], by: Sequence[str] = ("workload",)) -> str:
    """One line per group of runs, each figure as `median (min-max)`."""
    figures = shown_figures(rows)
    return markdown_table(
        [*by, "runs", *figures],
        (
            [*(str(record[key]) for key in by), str(record["runs"]), *(_cell(record.get(figure)) for figure in figures)]
            for record in medians(rows, by)
        ),
    )


def number(value: float | None) -> str:
    """Four significant digits, and never an exponent."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 4 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def _cell(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    if spread["min"] == spread["max"]:
        return number(spread["median"])
    return f"{number(spread['median'])} ({number(spread['min'])}-{number(spread['max'])})"
