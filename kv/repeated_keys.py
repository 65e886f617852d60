"""YAML and JSON without the trap that a key given twice is dropped in silence, for whoever reads settings."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from typing import Any, Final

import yaml

from kv.yaml_extent import check_extent, too_deep

_JSON_TOKEN: Final = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\n]')


class RepeatedKeysError(ValueError):
    """A mapping gives a key more than once. `problems` has a line of text for each such key, with its lines."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def load_yaml(text: str) -> Any:
    """The content of the one YAML document in a text; None when it holds nothing.

    Raises:
        RepeatedKeysError: a key is given twice.
        yaml.YAMLError: it is no YAML, or none that is plain data.
        YamlExtentError: it is nested too deeply, holds itself, or holds too much.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        check_extent(root)
        # Before the mappings are built: building is what loses the earlier of two values.
        problems = list(_repeated_in_yaml(root, loader, set()))
        if problems:
            raise RepeatedKeysError(problems)
        return loader.construct_document(root)
    except RecursionError:
        raise too_deep() from None
    finally:
        loader.dispose()


def load_json(text: str) -> Any:
    """What `json.loads` makes of a text.

    Raises:
        RepeatedKeysError: a key is given twice.
        ValueError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    content = json.loads(text)
    problems = list(_repeated_in_json(text))
    if problems:
        raise RepeatedKeysError(problems)
    return content


def _repeated_in_yaml(node: yaml.Node, loader: yaml.SafeLoader, seen: set[int], place: str = "") -> Iterator[str]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _repeated_in_yaml(item, loader, seen, f"{place}.{i}" if place else str(i))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            # `<<` stands for another mapping's keys and is no value of its own.
            merge = key_node.tag == "tag:yaml.org,2002:merge"
            key = "<<" if merge else loader.construct_object(key_node, deep=True)
            here = f"{place}.{key}" if place else str(key)
            if isinstance(key, Hashable):
                line = key_node.start_mark.line + 1
                if key in lines:
                    yield _problem(here, lines[key], line)
                lines[key] = line
            yield from _repeated_in_yaml(value_node, loader, seen, here)


def _repeated_in_json(text: str) -> Iterator[str]:
    """The text is known to be JSON, so that a string before a colon is a key, and brackets come in pairs."""
    line = 1
    objects: list[dict[str, int]] = []
    for token in _JSON_TOKEN.finditer(text):
        if token[0] == "\n":
            line += 1
        elif token[0] == "{":
            objects.append({})
        elif token[0] == "}":
            objects.pop()
        elif token[2] is not None:
            key = json.loads(token[1])
            if key in objects[-1]:
                yield _problem(key, objects[-1][key], line)
            objects[-1][key] = line
            line += token[2].count("\n")


def _problem(place: str, first: int, second: int) -> str:
    return f"{place}: given twice, in line {first} and in line {second}; keep one of them"
