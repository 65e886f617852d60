"""What follows from a report's content: extreme points, what a limit says, what a month costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tuning.report.content import JobReport, LeftOut, Objective, ReportedPoint, Slo

_NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")

LATENCY, THROUGHPUT, COST = 0, 1, 2
"""Places of the objectives."""


@dataclass(frozen=True, slots=True)
class SloCheck:
    """What a point makes of a limit."""

    slo: Slo
    value: float
    worst_window: float | None
    """Mean of the latency in the worst five minutes; None where the limit is for no latency, or nothing was seen."""
    is_mean: bool
    """The limit is for a mean, so that those five minutes can be held to it."""

    @property
    def holds(self) -> bool:
        return self.slo.miss(self.value) == 0

    @property
    def window_holds(self) -> bool | None:
        """Whether the mean of the worst five minutes is within the limit."""
        return None if self.worst_window is None else self.slo.miss(self.worst_window) == 0


def extremes(report: JobReport) -> list[tuple[Objective, ReportedPoint]]:
    """For each objective the point of the front that is best in it; of equals the cheapest, as the job says.

    These may be three different configurations. Empty without a front.
    """
    front = [each for each in report.points if each.on_front]
    if not front:
        return []
    return [
        (objective, min(front, key=partial(_losses, report, first)))
        for first, objective in enumerate(report.objectives)
    ]


def shown_point(report: JobReport) -> ReportedPoint | None:
    """The chosen point, else the one that misses the limits by least."""
    place = report.choice.chosen if report.choice.chosen is not None else report.choice.closest
    return None if place is None else report.points[place]


def slo_checks(report: JobReport, point: ReportedPoint) -> list[SloCheck]:
    """Each limit with what the point makes of it."""
    return [
        SloCheck(slo, value, point.figures.worst_window(slo.name), "_mean_" in slo.name)
        for slo, value in zip(report.slos, point.slo_values, strict=True)
    ]


def per_month(report: JobReport, per_hour: float) -> float:
    """What runs for the price book's month."""
    return per_hour * report.prices.hours_per_month


def per_million_tokens(point: ReportedPoint) -> float | None:
    """What a million tokens cost, prompts and answers, at the traffic of the trace; None when none were seen."""
    rate = point.figures.tokens_per_s
    return point.bill.per_hour / (rate * 3600) * 1e6 if rate else None


def by_reason(left_out: Sequence[LeftOut]) -> list[tuple[str, int]]:
    """How many were left out for which reason, the most frequent first.

    Reasons that are the same but for their numbers are taken together, and numbers that differ become ranges.
    """
    numbers: dict[str, list[list[str]]] = {}
    for each in left_out:
        numbers.setdefault(_NUMBER.sub("#", each.reason), []).append(_NUMBER.findall(each.reason))
    rows = []
    for shape, members in numbers.items():
        parts = shape.split("#")
        ranges = [_range(column) for column in zip(*members, strict=True)]
        # A reason may have a # of its own.
        reason = _interleaved(parts, ranges) if len(parts) == len(ranges) + 1 else shape
        rows.append((reason, len(members)))
    return sorted(rows, key=lambda row: -row[1])


def _range(column: Sequence[str]) -> str:
    least, most = min(column, key=float), max(column, key=float)
    return least if float(least) == float(most) else f"{least} to {most}"


def _interleaved(parts: Sequence[str], between: Sequence[str]) -> str:
    return parts[0] + "".join(number + part for number, part in zip(between, parts[1:], strict=True))


def _losses(report: JobReport, first: int, point: ReportedPoint) -> tuple[float, ...]:
    """Objectives, all to be small: one of them, then the cost, then all."""
    losses = [
        value if objective.better == "lower" else -value
        for objective, value in zip(report.objectives, point.objectives, strict=True)
    ]
    return (losses[first], losses[COST], *losses)
