"""How axes are written on the command line: one value, which is fixed, or a range, which is searched."""

from __future__ import annotations

import re
from typing import Final

from tuning.option_types import shown, whole_number
from tuning.pareto.space import CategoricalAxis, NumericAxis

NO_LIMIT = "none"
MAX_GIB: Final = 2**30
"""An exbibyte. All positions of an axis fit the 64-bit numbers of samplers with room to spare."""
MAX_TTL_S: Final = 10**9
"""Thirty years."""
MAX_INSTANCES: Final = 10_000
"""Each is an object of the simulation."""
MAX_COARSE_VALUES: Final = 64

_RANGE = re.compile(r"(\d+):(\d+):(\d+)(?:/(\d+))?")
_ALLOWED = "a whole number, or LOW:HIGH:COARSE/FINE (look every COARSE first, go down to steps of FINE)"


def numeric_axis(name: str, text: str, most: int) -> int | NumericAxis:
    """`512` is fixed; `0:2048:512/16` is searched; `1:8:1` is searched with one step for both.

    Args:
        most: the largest number that is allowed.

    Raises:
        ValueError: it is neither, or no such range, or above `most`, or a range of more than `MAX_COARSE_VALUES`.
    """
    match = _RANGE.fullmatch(text)
    if match is None and not text.isdecimal():
        raise ValueError(f"{name}: {shown(text)} is not allowed: give {_ALLOWED}")
    numbers = [whole_number(digits) for digits in (match.groups() if match else (text,)) if digits is not None]
    known = [number for number in numbers if number is not None and number <= most]
    if len(known) < len(numbers):
        raise ValueError(f"{name}: {shown(text)} is not allowed: numbers go up to {most}; give {_ALLOWED}")
    if match is None:
        return known[0]
    low, high, coarse, fine = known if len(known) == 4 else (*known, known[-1])
    if low >= high or not 0 < fine <= coarse or (high - low) % coarse or coarse % fine:
        raise ValueError(
            f"{name}: {text!r} is not allowed: HIGH must be above LOW by a multiple of COARSE, and COARSE a multiple "
            "of FINE, above 0"
        )
    if (high - low) // coarse >= MAX_COARSE_VALUES:
        raise ValueError(
            f"{name}: {text!r} is not allowed: it has {(high - low) // coarse + 1} coarse values, {MAX_COARSE_VALUES} "
            "are the most; give a larger COARSE, and the small step as FINE"
        )
    return NumericAxis(name, tuple(range(low, high + 1, coarse)), fine)


def ttl_axis(name: str, text: str) -> int | NumericAxis | None:
    """The same, or `none` for no limit."""
    return None if text == NO_LIMIT else numeric_axis(name, text, MAX_TTL_S)


def choice_axis(name: str, text: str, allowed: tuple[str, ...]) -> str | CategoricalAxis:
    """`lru` is fixed; `lru,lfu` is searched.

    Raises:
        ValueError: a word is not among `allowed`, or given twice.
    """
    words = tuple(text.split(","))
    for word in words:
        if word not in allowed:
            raise ValueError(f"{name}: {word!r} is not allowed: give {', '.join(allowed)}, or several with commas")
    return words[0] if len(words) == 1 else CategoricalAxis(name, words)
