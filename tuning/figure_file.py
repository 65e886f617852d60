"""YAML files of figures, read into dataclasses so that nothing in them is passed over in silence."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
_TOO_LARGE = 2**63
_OTHER_THAN_IT_LOOKS = re.compile(r"[-+]?(.*:.*|0[0-7_]+)")
"""To the base of 60, or of 8: 3:43 is 223, and 010 is 8."""
"""For a whole number: what is made of larger ones may be no float any more."""


class FigureFileError(ValueError):
    """A file that is refused. The message says in which line and why."""


class FigureError(ValueError):
    """What a dataclass raises about one of its fields, so that the message can say the field's line."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place
        """The field, or a dotted path below it: `steps.2`."""


def figure_file_names(folder: Path) -> list[str]:
    """What `find_figure_file` takes as a name."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def find_figure_file(name_or_path: str, folder: Path) -> Path:
    """The file `folder/NAME.yaml`, or what the path says where it has a slash or ends in .yaml.

    Raises:
        FigureFileError: there is none of this name.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    path = folder / f"{name_or_path}.yaml"
    if not path.is_file():
        known = ", ".join(figure_file_names(folder))
        raise FigureFileError(
            f"there is no {folder.name} file named {name_or_path!r}: give the path of one, or {known}"
        )
    return path


def read_figure_file(path: Path, kind: type[T], check: Callable[[T], None] | None = None) -> T:
    """Reads a file whose keys are the fields of a dataclass.

    Fields may be str, int, float, dataclasses, `tuple[X, ...]` (a list), `dict[str, X]` and `X | None`. Those with a
    default may be left out. A whole number may be written as 85.9e9, and a date without quotes.

    Args:
        check: raises FigureError of what is refused in a file though the dataclass takes it.

    Raises:
        FigureFileError: it can't be read, a key is unknown, missing or given twice, a value is of another type, or the
            dataclass or `check` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FigureFileError(f"{path} can't be read ({error}): give the path of a YAML file") from error
    try:
        root = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        raise FigureFileError(f"{path} is not YAML: {error}") from error
    except RecursionError as error:
        raise FigureFileError(f"{path} is nested too deeply: it must have {_keys_of(kind)}") from error
    if root is None:
        raise FigureFileError(f"{path} is empty: it must have {_keys_of(kind)}")
    builder = _Builder(path)
    built: T = builder.build(kind, root, "")
    if check is not None:
        with builder.refusals(""):
            check(built)
    return built


class _Loader(yaml.SafeLoader):
    """Takes 3e9 for a number, as YAML 1.2 does; PyYAML alone wants 3.0e+9."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class _Builder:
    """Turns the nodes of one file into values."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, int] = {}

    def build(self, kind: Any, node: yaml.Node, place: str) -> Any:
        self._lines.setdefault(place, node.start_mark.line + 1)  # a key's own line goes before its value's
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, node, place)
        arguments = get_args(kind)
        if get_origin(kind) is types.UnionType:  # X | None
            null = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
            return None if null else self.build(arguments[0], node, place)
        if get_origin(kind) is dict:
            values = self._mapping(node, place, "names with their values")
            return {key: self.build(arguments[1], value, _below(place, key)) for key, value in values.items()}
        if get_origin(kind) is tuple:
            if not isinstance(node, yaml.SequenceNode):
                raise self._refusal(place, f"given {_shown(node)}; allowed: a list")
            return tuple(self.build(arguments[0], item, _below(place, i)) for i, item in enumerate(node.value))
        return self._scalar(kind, node, place)

    @contextmanager
    def refusals(self, place: str) -> Iterator[None]:
        """Gives what is raised about the value at a place its line."""
        try:
            yield
        except FigureError as error:
            raise self._refusal(_below(place, error.place), str(error)) from error
        except ValueError as error:
            raise self._refusal(place, str(error)) from error

    def _dataclass(self, kind: Any, node: yaml.Node, place: str) -> Any:
        hints = get_type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind)}
        values = self._mapping(node, place, _keys_of(kind))
        for key in values:
            if key not in fields:
                raise self._refusal(_below(place, key), f"unknown key; allowed: {_keys_of(kind)}")
        for name, field in fields.items():
            if name not in values and field.default is dataclasses.MISSING:
                raise self._refusal(place, f"{name!r} is missing; required and allowed: {_keys_of(kind)}")
        built = {key: self.build(hints[key], value, _below(place, key)) for key, value in values.items()}
        with self.refusals(place):
            return kind(**built)

    def _mapping(self, node: yaml.Node, place: str, allowed: str) -> dict[str, yaml.Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._refusal(place, f"given {_shown(node)}; allowed: a mapping with {allowed}")
        values: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            key = str(key_node.value)
            here = _below(place, key)
            if key in values:
                raise self._refusal(here, f"given twice, here and in line {key_node.start_mark.line + 1}; keep one")
            values[key] = value
            self._lines[here] = key_node.start_mark.line + 1
        return values

    def _scalar(self, kind: type, node: yaml.Node, place: str) -> object:
        if isinstance(node, yaml.ScalarNode):
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            if kind is str and tag in ("str", "timestamp"):
                return str(node.value)
            if kind in (int, float) and tag in ("int", "float"):
                number = _number(node.value)
                if number is not None and _OTHER_THAN_IT_LOOKS.fullmatch(node.value):
                    reading = f"which YAML reads as {number:g}"
                    raise self._refusal(place, f"given {_shown(node)}, {reading}; allowed: decimal digits")
                if number is not None and kind is float:
                    return float(number)
                if number is not None and abs(number) < _TOO_LARGE and number == int(number):
                    return int(number)
        allowed = {str: "text", int: "a whole number", float: "a number"}[kind]
        if kind is not str and isinstance(node, yaml.ScalarNode) and len(node.value) > 18:
            allowed += " below 2^63"
        raise self._refusal(place, f"given {_shown(node)}; allowed: {allowed}")

    def _refusal(self, place: str, message: str) -> FigureFileError:
        known = place
        while known not in self._lines:  # a place that the dataclass named, below what was read
            known = known.rpartition(".")[0]
        return FigureFileError(f"{self._path}, line {self._lines[known]}: {f'{place}: ' if place else ''}{message}")


def _number(text: str) -> int | float | None:
    """None for whole numbers of 2^63 and more."""
    try:
        number: int | float = yaml.load(text, _Loader)
    except ValueError:  # thousands of digits
        return None
    return number if isinstance(number, float) or abs(number) < _TOO_LARGE else None


def _below(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _keys_of(kind: Any) -> str:
    return ", ".join(field.name for field in dataclasses.fields(kind))


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if len(node.value) <= 80 else repr(node.value[:77] + "...")
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
