"""How axes are written on the command line: one value, which is fixed, or a range, which is searched."""

from __future__ import annotations

import re

from tuning.pareto.space import CategoricalAxis, NumericAxis

NO_LIMIT = "none"
_RANGE = re.compile(r"(\d+):(\d+):(\d+)(?:/(\d+))?")
_ALLOWED = "a whole number, or LOW:HIGH:COARSE/FINE (look every COARSE first, go down to steps of FINE)"


def numeric_axis(name: str, text: str) -> int | NumericAxis:
    """`512` is fixed; `0:2048:512/16` is searched; `1:8:1` is searched with one step for both.

    Raises:
        ValueError: it is neither, or no such range.
    """
    if text.isdecimal():
        return int(text)
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{name}: {text!r} is not allowed: give {_ALLOWED}")
    low, high, coarse = (int(match[index]) for index in (1, 2, 3))
    fine = int(match[4] or coarse)
    if low >= high or not 0 < fine <= coarse or (high - low) % coarse or coarse % fine:
        raise ValueError(
            f"{name}: {text!r} is not allowed: HIGH must be above LOW by a multiple of COARSE, and COARSE a multiple "
            "of FINE, above 0"
        )
    return NumericAxis(name, tuple(range(low, high + 1, coarse)), fine)


def ttl_axis(name: str, text: str) -> int | NumericAxis | None:
    """The same, or `none` for no limit."""
    return None if text == NO_LIMIT else numeric_axis(name, text)


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
