"""What a node store holds, and how many bytes of its limit are taken. Plain bookkeeping, no Ray."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kv.extents import ExtentInfo, extent_of


@dataclass(slots=True)
class _Held:
    info: ExtentInfo
    refs: tuple[Any, ...]
    is_published: bool = False


class StoreLedger:
    """Extents and tails with their references, within a limit.

    Bytes are reserved before anything is fetched; adding an extent or a tail turns as many reserved bytes into held
    ones, and removing it frees them. So `used_bytes` (reserved and held) never exceeds the limit. References are opaque
    here; whoever removes the last one frees the object.
    """

    def __init__(self, limit_bytes: int) -> None:
        if limit_bytes < 0:
            raise ValueError(f"limit_bytes={limit_bytes} is not allowed: give at least 0")
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._extents: dict[str, _Held] = {}
        self._tails: dict[str, tuple[tuple[Any, ...], int]] = {}

    @property
    def num_extents(self) -> int:
        """Extents held, published or not."""
        return len(self._extents)

    @property
    def num_tails(self) -> int:
        """Tails held."""
        return len(self._tails)

    def shortage(self, num_bytes: int) -> int:
        """Bytes that must be freed before `num_bytes` can be reserved; at most 0 when they can be now."""
        return self.used_bytes + num_bytes - self.limit_bytes

    def reserve(self, num_bytes: int) -> bool:
        """Take bytes of the limit; False, and nothing taken, when there is no room."""
        if self.shortage(num_bytes) > 0:
            return False
        self.used_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Free reserved bytes that nothing was added for."""
        self.used_bytes -= num_bytes

    def add_extent(self, info: ExtentInfo, refs: Iterable[Any]) -> None:
        """Hold an extent; `refs` go with `info.parts`. Its parts can be read from now on."""
        self._extents[info.extent_id] = _Held(info, tuple(refs))

    def publish(self, extent_id: str) -> None:
        """Note that the directory lists the extent. One that was removed meanwhile is no error."""
        if extent_id in self._extents:
            self._extents[extent_id].is_published = True

    def published(self) -> list[str]:
        """Ids of the extents that the directory was told of."""
        return [extent_id for extent_id, held in self._extents.items() if held.is_published]

    def extent(self, extent_id: str) -> ExtentInfo | None:
        """What is known of an extent that is held, or None."""
        held = self._extents.get(extent_id)
        return None if held is None else held.info

    def refs(self, extent_id: str) -> list[Any]:
        """References of an extent's parts, in their order; none when it is not held."""
        held = self._extents.get(extent_id)
        return [] if held is None else list(held.refs)

    def remove_extent(self, extent_id: str) -> None:
        """Let go of an extent. One that is not here is no error."""
        held = self._extents.pop(extent_id, None)
        if held is not None:
            self.used_bytes -= held.info.num_bytes

    def part(self, part_id: str) -> Any | None:
        """The reference of a part, or None."""
        extent_id, number = extent_of(part_id)
        held = self._extents.get(extent_id)
        return held.refs[number] if held is not None and number < len(held.refs) else None

    def add_tail(self, tail_id: str, refs: tuple[Any, ...], num_bytes: int) -> None:
        """Hold a tail."""
        self._tails[tail_id] = (refs, num_bytes)

    def remove_tail(self, tail_id: str) -> tuple[Any, ...] | None:
        """Let go of a tail and give its references to the caller; None when it is not here."""
        refs, num_bytes = self._tails.pop(tail_id, (None, 0))
        self.used_bytes -= num_bytes
        return refs
