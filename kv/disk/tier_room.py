"""How many bytes of a disk tier's limit are taken. Plain bookkeeping, to be used under the tier's lock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class TierRoom:
    """Files and reservations within a limit.

    Args:
        limit_bytes: at least 0.
        extent_bytes: of all files with an extent's name.
        others: bytes of everything else, by path.
    """

    def __init__(self, limit_bytes: int, extent_bytes: int, others: Mapping[Path, int]) -> None:
        self.extent_bytes = extent_bytes
        self.other_bytes = 0
        self.reserved_bytes = 0
        self._others: dict[Path, int] = {}
        self._held_bytes: int | None = None
        self.set_limit(limit_bytes)
        self.count_others(others)

    @property
    def limit_bytes(self) -> int:
        """That in force: what was set, or less while it is held."""
        return self._limit_bytes if self._held_bytes is None else min(self._limit_bytes, self._held_bytes)

    @property
    def used_bytes(self) -> int:
        """Files and reservations."""
        return self.extent_bytes + self.other_bytes + self.reserved_bytes

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must be freed before `num_bytes` can be reserved; at most 0 when they can be now."""
        return self.used_bytes + num_bytes - self.limit_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Raises ValueError when it is negative."""
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes={limit_bytes} is not allowed: give at least 0")
        self._limit_bytes = limit_bytes

    def hold_limit(self) -> None:
        """No more than what is used now, until `release_limit`."""
        self._held_bytes = self.used_bytes

    def release_limit(self) -> None:
        """The limit is again what was set."""
        self._held_bytes = None

    def others(self) -> list[Path]:
        """What is counted and is no extent."""
        return list(self._others)

    def count_others(self, others: Mapping[Path, int]) -> None:
        """These take so much now."""
        self._others.update(others)
        self.other_bytes = sum(self._others.values())
