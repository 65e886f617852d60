"""What a file of figures may say and no dataclass would refuse, but which is a slip: another unit, a date that is none.

Only files are held to it: figures that a program makes up, such as a device of one operation a second, are its own
business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

from tuning.figure_file import FigureError

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_FIRST_ZONE: Final = timedelta(hours=14)
"""Where the day begins first: a date is not in the future while it is today anywhere."""


@dataclass(frozen=True, slots=True)
class Range:
    """Where a figure is believed, and how it is written."""

    least: float
    most: float
    unit: str
    example: str
    """A figure as people say it, and as the file wants it."""


def check_range(place: str, value: float, allowed: Range) -> None:
    """Raises FigureError where a figure is outside of what is believed."""
    if not allowed.least <= value <= allowed.most:
        raise FigureError(
            place,
            f"given {value:g}; allowed: {allowed.least:g} to {allowed.most:g} {allowed.unit}. Is it in another unit? "
            f"{allowed.example}",
        )


def check_text(place: str, text: str) -> None:
    """Raises FigureError where a text that a bill needs is empty."""
    if not text.strip():
        raise FigureError(place, f"given {text!r}; allowed: text that says something")


def check_date(place: str, text: str) -> None:
    """Raises FigureError where a text is no date as YYYY-MM-DD, or a date to come."""
    try:
        if not _DATE.fullmatch(text):
            raise ValueError("it has another form")
        day = date.fromisoformat(text)
    except ValueError as error:
        raise FigureError(
            place, f"given {text!r}, no date ({error}); allowed: a day as YYYY-MM-DD, as in 2026-01-31"
        ) from error
    today = (datetime.now(UTC) + _FIRST_ZONE).date()
    if day > today:
        raise FigureError(place, f"given {text}, which is to come; allowed: a day as YYYY-MM-DD, {today} at the latest")
