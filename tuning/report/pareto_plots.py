"""Objectives against each other: cost and latency, cost and throughput, everything side by side."""

from __future__ import annotations

from html import escape
from typing import Any

import plotly.graph_objects as go

from tuning.report.content import JobReport, Objective, ReportedPoint
from tuning.report.findings import COST, LATENCY, THROUGHPUT
from tuning.report.parallel_axes import ParallelAxis, parallel_axes
from tuning.report.plotted import Plot, axis_position, groups, hover, titled_axis
from tuning.report.quantities import with_unit
from tuning.report.style import MARKS
from tuning.report.wording import capital

_LEGEND = {"orientation": "h", "yanchor": "bottom", "y": 1.01, "xanchor": "left", "x": 0}


def pareto_plots(report: JobReport) -> list[Plot]:
    """Empty when nothing was simulated."""
    if not report.points and report.baseline is None:
        return []
    return [_two(report, "cost-latency", LATENCY), _two(report, "cost-throughput", THROUGHPUT), _parallel(report)]


def _two(report: JobReport, name: str, place: int) -> Plot:
    cost, other = report.objectives[COST], report.objectives[place]
    figure = go.Figure()
    everyone: list[ReportedPoint] = []
    for group in groups(report):
        everyone += group.points
        figure.add_scatter(
            x=[each.objectives[COST] for each in group.points],
            y=[each.objectives[place] for each in group.points],
            mode="markers",
            marker=group.marker,
            name=escape(group.title),
            hovertext=[hover(report, group.title, each) for each in group.points],
            hoverinfo="text",
        )
    seen = _worth_seeing(report, everyone)
    x_axis = titled_axis(cost.title, cost.unit, [each.objectives[COST] for each in seen])
    values = [each.objectives[place] for each in seen]
    values += [slo.limit for slo in report.slos if slo.name == other.name and slo.limit <= 2 * max(values)]
    y_axis = titled_axis(other.title, other.unit, values)
    figure.update_layout(xaxis=x_axis, yaxis=y_axis, legend=_LEGEND, margin={"t": 50, "r": 20, "b": 50, "l": 60})
    for slo in report.slos:
        at = axis_position(y_axis, slo.limit)
        if slo.name == other.name and at is not None:
            figure.add_hline(y=slo.limit, line={"dash": "dash", "width": 1.5, "color": MARKS["misses"]})
            figure.add_annotation(
                text=f"limit {escape(with_unit(slo.limit, slo.unit))}",
                x=1,
                xref="x domain",
                xanchor="right",
                y=at,
                yanchor="bottom",
                showarrow=False,
            )
    outside = sum(not _within(each, x_axis, y_axis, place) for each in everyone)
    unseen = f" {outside} that miss a limit lie outside the first view: double-click to see them." if outside else ""
    better = "lower" if other.better == "lower" else "upper"
    return Plot(
        name,
        f"{capital(other.title)} against {cost.title}",
        f"Each mark is a configuration; better is towards the {better} left. Rest on a mark to see all of it; drag to "
        "zoom, double-click to zoom out. A point of the front may look beaten here: it is better in the objective that "
        f"this plot does not show.{unseen}",
        f"Scatter plot of {len(everyone)} configurations. "
        + " ".join((_span(everyone, cost, COST), _span(everyone, other, place), _named(report, place))),
        figure,
    )


def _parallel(report: JobReport) -> Plot:
    axes = parallel_axes(report)
    places = list(range(len(axes)))
    figure = go.Figure()
    for group in groups(report):
        x: list[int | None] = []
        y: list[float | None] = []
        text: list[str] = []
        for each in group.points:
            x += [*places, None]
            y += [*(axis.height(each) for axis in axes), None]
            text += [hover(report, group.title, each)] * (len(places) + 1)
        line = {"color": group.marker["color"], "width": group.width, "dash": group.dash}
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            line=line,
            marker={**group.marker, "size": max(5, group.marker["size"] - 5)},
            opacity=0.55 if group.width == 1 else 1,
            name=escape(group.title),
            hovertext=text,
            hoverinfo="text",
        )
    for place, axis in enumerate(axes):
        figure.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, layer="below", line={"width": 1})
        for height, label in axis.labels:
            figure.add_annotation(
                x=place, y=height, text=escape(label), showarrow=False, xanchor="left", xshift=7, font={"size": 11}
            )
    titles = [_axis_title(axis) for axis in axes]
    bare = {"showgrid": False, "zeroline": False, "showline": False}
    figure.update_layout(
        xaxis={
            **bare,
            "tickvals": places,
            "ticktext": titles,
            "tickangle": 0,
            "side": "bottom",
            "range": [-0.25, len(axes) - 0.35],
        },
        yaxis={**bare, "showticklabels": False, "range": [-0.06, 1.06]},
        legend=_LEGEND,
        margin={"t": 60, "r": 20, "b": 70, "l": 20},
        hovermode="closest",
    )
    return Plot(
        "everything",
        "Settings and objectives side by side",
        "Each line is a configuration, from its settings at the left to what they give at the right. Objectives are "
        "turned so that better is up. Settings that are the same everywhere are left out. Click in the legend to hide "
        "a group.",
        f"Parallel coordinates of the same configurations over {', '.join(axis.title for axis in axes)}.",
        figure,
        520,
        84 * len(axes),
    )


def _worth_seeing(report: JobReport, everyone: list[ReportedPoint]) -> list[ReportedPoint]:
    """What a plot begins with: overloaded configurations would flatten all the others."""
    seen = [each for each in everyone if report.meets_slos(each)]
    if len(seen) < 2:
        return everyone
    return seen if report.baseline is None else [*seen, report.baseline]


def _within(point: ReportedPoint, x_axis: dict[str, Any], y_axis: dict[str, Any], place: int) -> bool:
    """Whether the first view of a plot has a point."""
    for axis, value in ((x_axis, point.objectives[COST]), (y_axis, point.objectives[place])):
        low, high = axis["range"]
        place_on_axis = axis_position(axis, value)
        if place_on_axis is None or not low <= place_on_axis <= high:
            return False
    return True


def _axis_title(axis: ParallelAxis) -> str:
    words = axis.title.split()
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= 16:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join([*map(escape, lines), *([f"({escape(axis.unit)})"] if axis.unit else [])])


def _span(points: list[ReportedPoint], objective: Objective, place: int) -> str:
    values = [each.objectives[place] for each in points]
    low, high = with_unit(min(values), objective.unit), with_unit(max(values), objective.unit)
    return f"{capital(objective.title)} from {low} to {high}."


def _named(report: JobReport, place: int) -> str:
    named = []
    if report.choice.chosen is not None:
        named.append(("The chosen configuration", report.points[report.choice.chosen]))
    if report.baseline is not None:
        named.append((f"The baseline ({report.baseline_title})", report.baseline))
    cost, other = report.objectives[COST], report.objectives[place]
    return " ".join(
        f"{name} is at {with_unit(each.objectives[COST], cost.unit)} and "
        f"{with_unit(each.objectives[place], other.unit)}."
        for name, each in named
    )
