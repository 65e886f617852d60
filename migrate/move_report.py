"""What came of a move that was ordered."""

from __future__ import annotations

from dataclasses import dataclass

from migrate.moves import Move


class MoveFailedError(Exception):
    """The move was refused, or was begun and came to nothing: the instance serves as before. The message says why."""


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a move took."""

    move: Move
    weight_bytes: int
    """That crossed the link."""
    kv_bytes: int
    """Pages that were copied, those that were copied twice included."""
    duration_s: float
    held_s: float
    """For so long no step began."""
    pool_blocks: int
    """Of the home's pool afterwards."""
