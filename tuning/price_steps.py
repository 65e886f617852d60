"""What a size costs where prices go by steps of capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tuning.figure_file import FigureError


class Step(Protocol):
    """Sizes above `above_gib`, up to and with `up_to_gib`."""

    @property
    def above_gib(self) -> float: ...

    @property
    def up_to_gib(self) -> float: ...


S = TypeVar("S", bound=Step)


@dataclass(frozen=True, slots=True)
class DramStep:
    """Price of an hour: `hour` whatever the size is within the step, and `gib_hour` for each GiB of the whole size.

    One of them at least: a step whose price was forgotten would be free. What is free says 0.
    """

    above_gib: float
    up_to_gib: float
    hour: float | None = None
    gib_hour: float | None = None

    def __post_init__(self) -> None:
        _check_step(self, "hour", "gib_hour")

    def hour_price(self, size_gib: float) -> float:
        """Of a size within the step."""
        return (self.hour or 0.0) + (self.gib_hour or 0.0) * size_gib


@dataclass(frozen=True, slots=True)
class DiskStep:
    """Price of a month, as `DramStep` has that of an hour, and what a disk of such a size does without extra charge."""

    above_gib: float
    up_to_gib: float
    iops: float
    """Reads and writes a second."""
    mb_per_s: float
    """10^6 bytes a second."""
    month: float | None = None
    gib_month: float | None = None

    def __post_init__(self) -> None:
        check_prices(self, ("iops", "mb_per_s"))
        _check_step(self, "month", "gib_month")

    def month_price(self, size_gib: float) -> float:
        """Of a size within the step."""
        return (self.month or 0.0) + (self.gib_month or 0.0) * size_gib


def _check_step(step: Step, flat: str, by_gib: str) -> None:
    given = [field for field in (flat, by_gib) if getattr(step, field) is not None]
    if not given:
        raise ValueError(f"the step has no price: give {flat}, {by_gib} or both, and 0 for what costs nothing")
    check_prices(step, given)


def check_prices(owner: object, fields: Sequence[str]) -> None:
    """Raises FigureError where a field is not a finite number of at least 0."""
    for field in fields:
        value = getattr(owner, field)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise FigureError(field, f"given {value!r}; allowed: a finite number of at least 0")


def check_steps(steps: Sequence[Step], place: str) -> None:
    """Raises FigureError unless the steps, in order, hold each size above 0 up to some limit exactly once.

    Args:
        place: of the steps, for messages: `place.2` is the third.
    """
    if not steps:
        raise FigureError(place, "there are no steps; allowed: at least one, from above_gib 0 on")
    end_gib = 0.0
    for number, step in enumerate(steps):
        if not step.above_gib < step.up_to_gib:  # so that NaN is refused too
            raise FigureError(
                f"{place}.{number}",
                f"up_to_gib is {step.up_to_gib:g}; allowed: more than above_gib, {step.above_gib:g}",
            )
        if step.above_gib != end_gib:
            before = f"the step before ends at {end_gib:g} GiB" if number else "sizes begin at 0 GiB"
            what = "a gap" if step.above_gib > end_gib else "an overlap"
            raise FigureError(
                f"{place}.{number}",
                f"above_gib is {step.above_gib:g}, but {before}: {what}; give above_gib: {end_gib:g}",
            )
        end_gib = step.up_to_gib


def step_at(steps: Sequence[S], size_gib: float, what: str) -> S:
    """The step that a size above 0 is in; a size at an edge is in the step that ends there.

    Raises:
        ValueError: the size is beyond the last step; `what` says of what.
    """
    for step in steps:
        if size_gib <= step.up_to_gib:
            return step
    raise ValueError(f"{what} of {size_gib:g} GiB has no price: sizes end at {steps[-1].up_to_gib:g} GiB")
