"""Configurations, statuses and comparisons in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tuning.pareto.space import Point
from tuning.report.content import JobReport, ReportedPoint
from tuning.report.findings import COST, LATENCY, THROUGHPUT, SloCheck
from tuning.report.quantities import change, with_unit


def capital(text: str) -> str:
    """The beginning of a sentence. The name of a setting stays as it is written."""
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def titled(title: str, unit: str) -> str:
    """The head of a column: "Mean time to first token (s)"."""
    return f"{capital(title)} ({unit})" if unit else capital(title)


def settings_lines(report: JobReport, point: Point) -> list[str]:
    """Each setting of a point with its title and unit."""
    return [f"{axis.title} {with_unit(point[axis.name], axis.unit)}" for axis in report.axes]


def settings(report: JobReport, point: Point) -> str:
    """A point in a line."""
    return ", ".join(settings_lines(report, point)) or "no setting was open"


def status(report: JobReport, point: ReportedPoint) -> str:
    """What became of an evaluated point."""
    if not report.meets_slos(point):
        return "misses a limit"
    return "on the front" if point.on_front else "beaten by another"


@dataclass(frozen=True, slots=True)
class Sense:
    """What it means that a quantity falls or rises: a sign alone leaves it to the reader."""

    falls: str
    rises: str

    def word(self, value: float, before: float) -> str:
        """For two values that differ."""
        return self.falls if value < before else self.rises


TIME: Final = Sense("faster", "slower")
RATE: Final = Sense("less", "more")
PRICE: Final = Sense("cheaper", "dearer")
SENSES: Final = {LATENCY: TIME, THROUGHPUT: RATE, COST: PRICE}
"""By the place of an objective."""


def judged_change(value: float, before: float, sense: Sense) -> str:
    """A change in words too, unless it is too small to be seen: "−58.3 % (faster)"."""
    text = change(value, before)
    if value == before or text.startswith("±"):
        return text
    return f"{text} ({sense.word(value, before)})"


def limit(check: SloCheck) -> str:
    """A limit: "99th percentile of TTFT at most 4 s"."""
    slo = check.slo
    return f"{slo.title} {'at most' if slo.kind == 'at_most' else 'at least'} {with_unit(slo.limit, slo.unit)}"


def limit_sentence(check: SloCheck) -> str:
    """Whether a limit holds, and by how much it is missed."""
    value = with_unit(check.value, check.slo.unit)
    if check.holds:
        return f"{capital(limit(check))}: holds, with {value}."
    miss = check.slo.miss(check.value)
    share = f" ({change(check.value, check.slo.limit)})" if check.slo.limit else ""
    return f"{capital(limit(check))}: missed by {with_unit(miss, check.slo.unit)}{share}, with {value}."


def window_sentence(check: SloCheck) -> str:
    """What the worst five minutes make of a limit; empty where it is for no latency."""
    if check.worst_window is None:
        return ""
    value = with_unit(check.worst_window, check.slo.unit)
    if check.is_mean:
        verdict = "still within the limit" if check.window_holds else "above the limit, so it does not hold there"
        return f"In the worst five minutes it is {value}: {verdict}."
    verdict = "within" if check.window_holds else "above"
    return (
        f"In the worst five minutes the mean is {value}, {verdict} the limit; what this percentile is in those minutes "
        "the simulation does not tell."
    )
