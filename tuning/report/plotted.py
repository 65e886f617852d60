"""A plot of the page, and what plots have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from tuning.report.content import JobReport, ReportedPoint
from tuning.report.findings import per_month, shown_point
from tuning.report.quantities import money, number, with_unit
from tuning.report.style import MARKS
from tuning.report.wording import settings_lines, status, titled

_LOG_FROM_RATIO: Final = 20
"""Highest value by lowest from which an axis is logarithmic: else one overloaded point flattens all others."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure with what is said about it."""

    name: str
    """Id in the page."""
    title: str
    caption: str
    description: str
    """In words, with the figures that matter: for who can't see it."""
    figure: Any
    """`plotly.graph_objects.Figure`; the page gives it colours of text and lines."""
    height_px: int = 440
    least_width_px: int = 320
    """Below it the plot scrolls."""


@dataclass(frozen=True, slots=True)
class Group:
    """Points that are drawn alike: a colour and a shape each, so that neither alone tells them apart."""

    title: str
    points: tuple[ReportedPoint, ...]
    marker: dict[str, Any]
    width: float
    """Of lines."""
    dash: str = "solid"


def groups(report: JobReport) -> Iterator[Group]:
    """All points, those that matter most at last, so that they lie above the others. Empty groups are left out."""
    shown = shown_point(report)
    shown_title = "chosen" if report.choice.chosen is not None else "closest to the limits"
    baseline = None if report.baseline is None else report.baseline.point
    others = [each for each in report.points if each is not shown and each.point != baseline]
    feasible = [each for each in others if report.meets_slos(each)]
    edge = {"line": {"width": 1, "color": "#ffffff"}}
    all_groups = [
        Group(
            "misses a limit",
            tuple(each for each in others if not report.meets_slos(each)),
            {"symbol": "x-thin", "size": 8, "line": {"width": 2, "color": MARKS["misses"]}, "color": MARKS["misses"]},
            1,
            "dot",
        ),
        Group(
            "beaten by another",
            tuple(each for each in feasible if not each.on_front),
            {"symbol": "circle-open", "size": 8, "color": MARKS["beaten"]},
            1,
        ),
        Group(
            "on the front",
            tuple(each for each in feasible if each.on_front),
            {"symbol": "circle", "size": 10, "color": MARKS["front"], **edge},
            1.5,
        ),
        Group(
            f"baseline: {report.baseline_title}",
            () if report.baseline is None else (report.baseline,),
            {"symbol": "diamond", "size": 15, "color": MARKS["baseline"], **edge},
            3,
            "dash",
        ),
        Group(
            shown_title,
            () if shown is None else (shown,),
            {"symbol": "star", "size": 19, "color": MARKS["chosen"], **edge},
            4,
        ),
    ]
    return (group for group in all_groups if group.points)


def hover(report: JobReport, title: str, point: ReportedPoint) -> str:
    """The whole configuration and what it gives, as lines of plotly's own HTML: so it is escaped here."""
    currency = report.prices.currency
    lines = [
        *settings_lines(report, point.point),
        "",
        *(
            f"{objective.title}: {with_unit(value, objective.unit)}"
            for objective, value in zip(report.objectives, point.objectives, strict=True)
        ),
        *(
            f"{slo.title}: {with_unit(value, slo.unit)}"
            for slo, value in zip(report.slos, point.slo_values, strict=True)
            if slo.name not in {objective.name for objective in report.objectives}
        ),
        f"{money(per_month(report, point.bill.per_hour), currency)} a month, GPUs: {point.bill.gpus}",
        status(report, point),
    ]
    return "<br>".join([f"<b>{escape(title)}</b>", *map(escape, lines)])


def is_spread(values: Sequence[float]) -> bool:
    """Whether values differ by so much that their axis is to be logarithmic."""
    return min(values) > 0 and max(values) / min(values) >= _LOG_FROM_RATIO


def titled_axis(title: str, unit: str, values: Sequence[float]) -> dict[str, Any]:
    """An axis for values, with room at both ends; logarithmic where they differ by much, which its title then says."""
    name = escape(titled(title, unit))
    axis: dict[str, Any] = {"automargin": True, "zeroline": False, "showline": True, "separatethousands": True}
    axis["exponentformat"] = "none"
    low, high = min(values), max(values)
    if not is_spread(values):
        room = 0.08 * (high - low) or 0.1 * abs(high) or 1
        return {**axis, "title": {"text": name}, "range": [low - room, high + room]}
    low, high = math.log10(low), math.log10(high)
    ticks = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in (1, 2, 5)]
    return {
        **axis,
        "title": {"text": f"{name}, logarithmic"},
        "type": "log",
        "range": [low - 0.08 * (high - low), high + 0.08 * (high - low)],
        "tickvals": ticks,
        "ticktext": [number(tick) for tick in ticks],
    }


def axis_position(axis: dict[str, Any], value: float) -> float | None:
    """Where a value lies in the range of a `titled_axis`; None where a logarithmic one has no place for it."""
    if "type" not in axis:
        return value
    return math.log10(value) if value > 0 else None
