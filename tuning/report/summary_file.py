"""A report's content as JSON, to make the page again: `dump`, `load`.

An object for each dataclass, with its fields as keys, and `version` at the top. All keys are required and no others are
allowed, so that neither a misspelt one nor one of another version is passed over in silence.
"""

from __future__ import annotations

import functools
import json
import math
import types
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from tuning.report.content import JobReport

VERSION = 1
_TOO_LARGE = 2**63
"""No count or size of a job comes near; what is made of larger ones may be no float any more."""


class SummaryError(ValueError):
    """A summary that is refused. The message says where, what was given and what is allowed."""


def dump(report: JobReport) -> str:
    """The JSON that `load` makes an equal report of.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps({"version": VERSION, **asdict(report)}, indent=1, allow_nan=False) + "\n"


def load(text: str) -> JobReport:
    """The report that a summary holds.

    Raises:
        SummaryError: it is not JSON, of another version, has unknown, missing or doubled keys, or a value that is not
            allowed.
    """
    try:
        root = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise SummaryError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error
    except SummaryError:  # of the hooks
        raise
    except RecursionError as error:
        raise SummaryError("nested too deeply: give a summary that a tuning job wrote") from error
    except ValueError as error:
        raise SummaryError("a number has thousands of digits: give a summary that a tuning job wrote") from error
    if not isinstance(root, dict) or "version" not in root:
        raise SummaryError("no version: give the summary that a tuning job wrote")
    version = root.pop("version")
    if version != VERSION or isinstance(version, bool):
        raise SummaryError(f"version={_shown(version)} is not allowed: this program reads version {VERSION}")
    report: JobReport = _build(JobReport, root, "")
    return report


def read_summary(path: Path) -> JobReport:
    """`load` of a file, whose name is in the messages.

    Raises:
        SummaryError: as `load`, or it can't be read.
    """
    try:
        return load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SummaryError(f"{path}: cannot be read: {error}") from error
    except SummaryError as error:
        raise SummaryError(f"{path}: {error}") from error


def _build(kind: Any, value: Any, place: str) -> Any:
    """A value of a type, made of JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass(kind, value, place)
    if origin in (types.UnionType, Union):
        if value is None and type(None) in arguments:
            return None
        plain = [each for each in arguments if each is not type(None)]
        return _build(plain[0], value, place) if len(plain) == 1 else _one_of(plain, value, place)
    if origin is Literal:
        if value not in arguments:
            raise _refusal(place, value, " or ".join(map(repr, arguments)))
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _refusal(place, value, "a list")
        if arguments[-1] is not ... and len(arguments) != len(value):
            raise _refusal(place, value, f"a list of {len(arguments)}")
        return tuple(_build(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _refusal(place, value, "an object")
        return {key: _build(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    return _one_of([kind], value, place)


def _dataclass(kind: Any, value: Any, place: str) -> Any:
    names = [field.name for field in fields(kind)]
    if not isinstance(value, dict):
        raise _refusal(place, value, f"an object with {', '.join(names)}")
    for key in value:
        if key not in names:
            raise SummaryError(f"{place or 'summary'}: unknown key {key!r}; allowed: {', '.join(names)}")
    for name in names:
        if name not in value:
            raise SummaryError(f"{place or 'summary'}: {name!r} is missing; required: {', '.join(names)}")
    hints = _hints(kind)
    built = {name: _build(hints[name], value[name], f"{place}.{name}" if place else name) for name in names}
    try:
        return kind(**built)
    except ValueError as error:
        raise SummaryError(f"{place or 'summary'}: {error}") from error


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _one_of(kinds: list[type], value: Any, place: str) -> Any:
    """A plain value that is of one of these types; an int is a float too, where no int is asked for."""
    if type(value) is int and abs(value) >= _TOO_LARGE:
        raise _refusal(place, value, "a smaller number")
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        return float(value)
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    raise _refusal(place, value, " or ".join(names[kind] for kind in kinds))


def _refusal(place: str, value: Any, allowed: str) -> SummaryError:
    return SummaryError(f"{place or 'summary'}: given {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    try:
        shown = json.dumps(value)
    except RecursionError:  # what can be read is not always what can be written
        return "what is nested too deeply"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _refuse_constant(text: str) -> NoReturn:
    raise SummaryError(f"{text} is not allowed: give finite numbers, or null where nothing was seen")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise SummaryError(f"key {doubled!r} is given twice: keep one")
    for name, value in pairs:
        if isinstance(value, float) and math.isinf(value):  # 1e999
            raise SummaryError(f"{name}: the number is too large: give finite numbers")
    return made
