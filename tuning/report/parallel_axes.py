"""Axes of the plot that shows settings and objectives side by side, each scaled to between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tuning.report.content import JobReport, ReportedPoint
from tuning.report.plotted import is_spread
from tuning.report.quantities import number


@dataclass(frozen=True, slots=True)
class ParallelAxis:
    """One of them."""

    title: str
    unit: str
    height: Callable[[ReportedPoint], float]
    """Where a point lies, from 0 at the bottom to 1 at the top."""
    labels: tuple[tuple[float, str], ...]
    """Heights and what is written there."""


def parallel_axes(report: JobReport) -> list[ParallelAxis]:
    """Those of the settings that differ, then those of the objectives, with the better end at the top."""
    points = [*report.points, *([report.baseline] if report.baseline is not None else [])]
    axes = []
    for axis in report.axes:
        values = [each.point[axis.name] for each in points]
        if len(set(values)) < 2:
            continue
        numbers = [float(value) for value in values if not isinstance(value, str)]
        if len(numbers) == len(values):
            axes.append(_of_numbers(axis.title, axis.unit, numbers, _setting(axis.name), "higher"))
        else:
            axes.append(_of_choices(axis.title, axis.unit, sorted(map(str, values)), axis.name))
    for place, objective in enumerate(report.objectives):
        numbers = [each.objectives[place] for each in points]
        axes.append(_of_numbers(objective.title, objective.unit, numbers, _objective(place), objective.better))
    return axes


def _of_numbers(
    title: str, unit: str, values: list[float], read: Callable[[ReportedPoint], float], top: str
) -> ParallelAxis:
    low, high = min(values), max(values)
    is_log = is_spread(values)
    scale: Callable[[float], float] = math.log if is_log else float

    def share(value: float) -> float:
        if low == high:
            return 0.5
        up = (scale(value) - scale(low)) / (scale(high) - scale(low))
        return up if top == "higher" else 1 - up

    middle = math.sqrt(low * high) if is_log else (low + high) / 2
    labels = tuple((share(value), number(value)) for value in dict.fromkeys((low, middle, high)))
    return ParallelAxis(title, unit, lambda point: share(read(point)), labels)


def _of_choices(title: str, unit: str, values: list[str], name: str) -> ParallelAxis:
    choices = list(dict.fromkeys(values))
    heights = {choice: place / max(1, len(choices) - 1) for place, choice in enumerate(choices)}
    labels = tuple((height, choice) for choice, height in heights.items())
    return ParallelAxis(title, unit, lambda point: heights[str(point.point[name])], labels)


def _setting(name: str) -> Callable[[ReportedPoint], float]:
    return lambda point: float(point.point[name])


def _objective(place: int) -> Callable[[ReportedPoint], float]:
    return lambda point: point.objectives[place]
