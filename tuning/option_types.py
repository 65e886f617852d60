"""Types of options on command lines: what is allowed, and the message when something else is given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Final

MAX_WHOLE: Final = 2**31 - 1
"""The largest whole number of an option, where nothing else limits it."""
_MAX_DIGITS: Final = 18
"""Fit an int64. Python itself refuses to read thousands of digits, with a message that does not say what is allowed."""


def whole(least: int, most: int = MAX_WHOLE) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def number(text: str) -> int:
        value = whole_number(text)
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not allowed: give a whole number from {least} to {most}"
            )
        return value

    return number


def whole_number(text: str) -> int | None:
    """None where the text is none, or has more digits than any number that is allowed."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def shown(text: str) -> str:
    """What was given, cut to what fits a line."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def between(least: float, most: float) -> Callable[[str], float]:
    """A number from `least` to `most`."""

    def number(text: str) -> float:
        value = _float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: give a number from {least:g} to {most:g}")
        return value

    return number


def above_0(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: give a finite number above 0")
    return value


def at_least_0(text: str) -> float:
    """A finite number of at least 0."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: give a finite number of at least 0")
    return value


def above_0_or_inf(text: str) -> float:
    """A number above 0, inf included."""
    value = _float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: give a number above 0, or inf for no limit")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not allowed: give a share above 0 and at most 1")
    return value


def _float(text: str) -> float:
    """NaN, which is in no range, where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
