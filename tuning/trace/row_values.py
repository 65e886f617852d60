"""Values of a row, checked one by one."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from tuning.trace.errors import RowError

MAX_TOKENS: Final = 2**31 - 1
"""Longest prompt or answer that is believed."""
MAX_CLOCK_S: Final = 10**11
"""Three thousand years: clocks that count from 1970 are within it, in the right unit."""
MAX_ID: Final = 2**63 - 1
MAX_HASH: Final = 2**64 - 1


def json_object(text: str) -> Mapping[str, Any]:
    """The JSON object that a line holds.

    Raises:
        RowError: the line holds anything else, NaN or an infinity somewhere, or an object that has a key twice.
    """
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise RowError("not JSON", f"this is not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise RowError("not a JSON object", f"found {_shown(value)}: each line must be one JSON object")
    return value


def integer(row: Mapping[str, Any], field: str, least: int, most: int) -> int:
    """An int, or a float without a fraction, from `least` to `most`.

    Raises:
        RowError: it is missing or anything else.
    """
    value = row.get(field, _MISSING)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        _refuse(field, value, f"a whole number from {least} to {most}")
    return value


def clock(row: Mapping[str, Any], field: str, ticks_per_s: int) -> float:
    """A time in ticks: an int or a float, from 0 to `MAX_CLOCK_S`.

    Raises:
        RowError: it is missing or anything else.
    """
    value = row.get(field, _MISSING)
    most = MAX_CLOCK_S * ticks_per_s
    if type(value) not in (int, float) or not 0 <= value <= most:
        _refuse(field, value, f"a number of {_UNITS[ticks_per_s]} from 0 to {most}")
    return float(value)


def text(row: Mapping[str, Any], field: str) -> str:
    """A string that can be written as UTF-8.

    Raises:
        RowError: it is missing or anything else.
    """
    value = row.get(field, _MISSING)
    if type(value) is not str:
        _refuse(field, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
        _refuse(field, value, "a string of whole characters")
    return value


def hashes(row: Mapping[str, Any], field: str) -> array[int]:
    """A list of block hashes, as an array of type "Q"; empty where the row has no such field.

    Raises:
        RowError: it is anything else.
    """
    value = row.get(field, [])
    if type(value) is not list:
        _refuse(field, value, "a list of whole numbers, one for each block of the input")
    if not _ONLY_INT.issuperset(map(type, value)):
        wrong = next(entry for entry in value if type(entry) is not int)
        _refuse(f"an entry of {field}", wrong, f"whole numbers from 0 to {MAX_HASH}")
    try:
        return array("Q", value)
    except OverflowError:
        wrong = next(entry for entry in value if not 0 <= entry <= MAX_HASH)
        _refuse(f"an entry of {field}", wrong, f"whole numbers from 0 to {MAX_HASH}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python's decoder by itself takes the last of two values in silence."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise RowError("a key is given twice", f"{_shown(twice)} is given twice: keep one of them")
    return values


_DECODER: Final = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_distinct_keys)
_ONLY_INT: Final = frozenset((int,))
_MISSING: Final = object()
_UNITS: Final = {1: "seconds", 1000: "milliseconds"}


def _refuse(field: str, value: object, allowed: str) -> NoReturn:
    if value is _MISSING:
        raise RowError(f"{field} is missing", f"{field} is missing: give {allowed}")
    raise RowError(f"{field} is not allowed", f"{field} is {_shown(value)}: allowed is {allowed}")


def _shown(value: object) -> str:
    """As in the file, cut to 40 characters."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a number of about {math.log10(abs(value)):.0f} digits"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
