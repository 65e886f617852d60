"""What is wrong with an application's settings, one line for each problem, in terms of the keys that were given."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, ValidationError

_Location = tuple[str | int, ...]


class SettingsError(ValueError):
    """Settings that can't be used. `problems` has one line for each thing that is wrong, each naming its key."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the application's settings:\n" + "\n".join(f"  - {line}" for line in problems))


def problems_of(error: ValidationError, root: type[BaseModel], overrides: Mapping[str, type[BaseModel]]) -> list[str]:
    """One line for each error that pydantic found, with the key's path, what was given and what is allowed.

    Errors of a validation inside a validator are listed under the key that holds them.

    Args:
        error: of validating `root`.
        root: the model of the whole mapping.
        overrides: for keys that hold an untyped mapping of overrides, the model whose keys are allowed there.
    """
    return _lines(error, (), root, overrides)


def shown(value: object) -> str:
    """A value as messages quote it: its type and, cut to 80 characters, its text."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _lines(
    error: ValidationError, prefix: _Location, root: type[BaseModel], overrides: Mapping[str, type[BaseModel]]
) -> list[str]:
    lines: list[str] = []
    for entry in error.errors(include_url=False):
        location = prefix + entry["loc"]
        key = ".".join(map(str, location)) or "args"
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, ValidationError):
            lines += _lines(cause, location, root, overrides)
        elif cause is not None:
            lines.append(f"{key}: {cause}" if location else str(cause))
        elif entry["type"] == "extra_forbidden":
            lines.append(_unknown_key(key, location, entry["input"], _allowed_keys(location[:-1], root, overrides)))
        else:
            message = entry["msg"]
            lines.append(f"{key}: given {shown(entry['input'])}, {message[:1].lower()}{message[1:]}")
    return lines


def _unknown_key(key: str, location: _Location, given: Any, allowed: list[str]) -> str:
    near = difflib.get_close_matches(str(location[-1]), allowed, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"{key}: unknown key (given {shown(given)}).{hint} Allowed here: {', '.join(allowed)}"


def _allowed_keys(location: _Location, root: type[BaseModel], overrides: Mapping[str, type[BaseModel]]) -> list[str]:
    """The keys of the settings block at a place such as ("prefill", "engine")."""
    model = root
    for part in map(str, location):
        annotation = model.model_fields[part].annotation
        typed = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        model = cast("type[BaseModel]", annotation) if typed else overrides[part]
    return sorted(model.model_fields)
