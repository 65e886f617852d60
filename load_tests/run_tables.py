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

_LEAST_CPU_MS = 0.005


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
                record[figure] = _spread(values)
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


def cpu_table(rows: Sequence[dict[str, Any]], by: Sequence[str] = ("workload",)) -> str:
    """CPU ms per output token by process label: one line per group of runs and label, as `median (min-max)`, the
    largest first. Labels whose median is below 0.005 ms are left out."""
    lines: list[list[str]] = []
    for record in medians(rows, by):
        group = [row for row in rows if all(row[key] == record[key] for key in by)]
        values: dict[str, list[float]] = {}
        for row in group:
            for label, cpu_ms in row.get("cpu_ms_per_output_token", {}).items():
                values.setdefault(label, []).append(cpu_ms)
        spreads = {label: _spread(cpu_ms) for label, cpu_ms in values.items()}
        lines.extend(
            [*(str(record[key]) for key in by), label, _cell(spread)]
            for label, spread in sorted(spreads.items(), key=lambda item: -item[1]["median"])
            if spread["median"] >= _LEAST_CPU_MS
        )
    return markdown_table([*by, "process", "cpu_ms_per_output_token"], lines)


def number(value: float | None) -> str:
    """Four significant digits, and never an exponent."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 4 - len(str(int(abs(value))))) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _cell(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    if spread["min"] == spread["max"]:
        return number(spread["median"])
    return f"{number(spread['median'])} ({number(spread['min'])}-{number(spread['max'])})"
