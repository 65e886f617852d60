"""Groups of stored blocks: prefix subtrees that are treated alike, each named by the key of the block at its root."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

REST: Final = 0
"""The group of whatever lies under no root."""
REST_NAME: Final = "rest"


class GroupTable:
    """Which group blocks belong to: that of the deepest root on their chain. Immutable, so it can be shared.

    A block's key names its whole prefix, so a root stands for exactly one subtree. Subtrees may lie in one another.

    Args:
        roots: name and root key of each group. They are numbered from 1 in this order; 0 is the rest.

    Raises:
        ValueError: a name or a root is given twice, or a name is "rest".
    """

    def __init__(self, roots: Iterable[tuple[str, bytes]] = ()) -> None:
        names = [REST_NAME]
        self._group_of_root: dict[bytes, int] = {}
        for name, root in roots:
            if name in names:
                raise ValueError(f"group name {name!r} is taken: give each group a name of its own, and none 'rest'")
            if root in self._group_of_root:
                other = names[self._group_of_root[root]]
                raise ValueError(f"root {root.hex()} of group {name!r} is that of {other!r}: give each its own")
            self._group_of_root[root] = len(names)
            names.append(name)
        self._names = tuple(names)

    @property
    def names(self) -> tuple[str, ...]:
        """Names by group number; the first is "rest"."""
        return self._names

    @property
    def has_roots(self) -> bool:
        """Whether there is any group but the rest."""
        return bool(self._group_of_root)

    def group_of(self, parent_group: int, keys: Sequence[bytes]) -> int:
        """Group of consecutive blocks of a chain that are stored together.

        Args:
            parent_group: group of the block before the first of them, by this table; 0 at the start of a chain.
            keys: their keys, in the order of the chain.

        Returns:
            The group of the deepest root among `keys`, also for the blocks before it; else `parent_group`.

        Raises:
            ValueError: `parent_group` is not a number of this table.
        """
        if not 0 <= parent_group < len(self._names):
            raise ValueError(f"parent_group={parent_group} is not allowed: give 0 to {len(self._names) - 1}")
        if self._group_of_root:
            for key in reversed(keys):
                group = self._group_of_root.get(key)
                if group is not None:
                    return group
        return parent_group
