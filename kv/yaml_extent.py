"""How large the content of a YAML document is, before it is built: a few lines whose aliases name one another may stand
for more than a machine can hold."""

from __future__ import annotations

from typing import Final

import yaml

MAX_VALUES: Final = 100_000
MAX_LEVELS: Final = 100
"""Both are far above what settings need."""


class YamlExtentError(ValueError):
    """A document holds more than is read; says of what."""


def check_extent(root: yaml.Node) -> None:
    """Raises YamlExtentError for more than `MAX_VALUES` keys and values, with aliases written out, or more than
    `MAX_LEVELS` of them within each other. What holds itself is more than that."""
    values, levels = _extent(root, {})
    if levels > MAX_LEVELS:
        raise too_deep()
    if values > MAX_VALUES:
        raise YamlExtentError(
            f"it holds more than {MAX_VALUES} values when its aliases (`*name`) are written out; use fewer of them"
        )


def too_deep() -> YamlExtentError:
    return YamlExtentError(f"it is nested more than {MAX_LEVELS} levels deep; take out some")


def _extent(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node; `known` has, by their ids, those of nodes that have been counted."""
    if id(node) not in known:
        known[id(node)] = MAX_VALUES, 0  # until it is counted, for an alias within itself
        parts = [_extent(part, known) for part in _parts(node)]
        known[id(node)] = 1 + sum(values for values, _ in parts), 1 + max((levels for _, levels in parts), default=0)
    return known[id(node)]


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []
