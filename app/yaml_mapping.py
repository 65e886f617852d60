"""YAML without the trap that a key given twice is dropped in silence."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import yaml

from app.settings_error import SettingsError


def read_yaml(path: Path, name: str, advice: str) -> Any:
    """The content of the one YAML document in a UTF-8 file; None when it holds nothing.

    Args:
        name: what messages call the file.
        advice: what to do about a file that can't be read.

    Raises: SettingsError: the file can't be read, is no YAML, or gives a key of a mapping more than once (each such key
    with its lines).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{name} can't be read ({error}); {advice}"]) from error
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            # Before the mappings are built: building is what loses the earlier of two values.
            repeated = list(_repeated_keys(root, loader, set())) if root is not None else []
            if repeated:
                raise SettingsError([f"{name}: {line}" for line in repeated])
            return loader.construct_document(root) if root is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SettingsError([f"{name} is not YAML: {error}"]) from error


def _repeated_keys(node: yaml.Node, loader: yaml.SafeLoader, seen: set[int], place: str = "") -> Iterator[str]:
    if id(node) in seen:  # an alias; it may even lead back to a mapping that holds it
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _repeated_keys(item, loader, seen, f"{place}.{i}" if place else str(i))
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
                    yield f"{here}: given twice, in line {lines[key]} and in line {line}; keep one of them"
                lines[key] = line
            yield from _repeated_keys(value_node, loader, seen, here)
