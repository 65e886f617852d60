"""Types of options on command lines: what is allowed, and the message when something else is given."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a whole number, {least} or more")
        return int(text)

    return number


def above_0(text: str) -> float:
    """A finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a finite number above 0")
    return value


def at_least_0(text: str) -> float:
    """A number of at least 0, inf included."""
    value = _float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a number, 0 or more, or inf")
    return value


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: give a share above 0 and at most 1")
    return value


def _float(text: str) -> float:
    """NaN, which is in no range, where the text is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
