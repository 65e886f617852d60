"""What was ordered, why, what was expected of it and what came of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from migrate.moves import LayerMove, Move
from migrate.prediction import Prediction

HISTORY_ENTRIES: Final = 512
"""Ended orders that are remembered. So many end within no cool-down."""


class Cause(StrEnum):
    """Who wanted a move."""

    PLAN = "plan"
    HAND = "hand"
    HOME = "home"
    """A person who wanted everything home."""


class Outcome(StrEnum):
    """What has become of an order."""

    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """It had not ended in time, and nobody waits for it any more."""


@dataclass(frozen=True, slots=True)
class Order:
    """A move that somebody is to make now."""

    order_id: int
    move: Move
    cause: Cause
    why: str
    begun_s: float
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Happened:
    """What a move took that was made."""

    weight_bytes: int
    kv_bytes: int
    duration_s: float
    held_s: float
    """For so long the instance began no step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One order, as far as it has come."""

    order: Order
    outcome: Outcome = Outcome.UNDER_WAY
    ended_s: float | None = None
    happened: Happened | None = None
    problem: str = ""
    """Why nothing came of it."""


class MoveHistory:
    """Orders under way, the last ones that ended, and totals of all there were."""

    def __init__(self, size: int = HISTORY_ENTRIES) -> None:
        self._under_way: dict[int, Entry] = {}
        self._ended: deque[Entry] = deque(maxlen=size)
        self.counts: Counter[tuple[str, Outcome]] = Counter()
        """Ended orders by kind of move and outcome."""
        self.moved_bytes: Counter[tuple[str, str]] = Counter()
        """By kind of move, and weights or kv."""
        self.held_s = 0.0

    @property
    def under_way(self) -> tuple[Entry, ...]:
        return tuple(self._under_way.values())

    @property
    def ended(self) -> tuple[Entry, ...]:
        """In the order of their ends."""
        return tuple(self._ended)

    def begin(self, order: Order) -> None:
        self._under_way[order.order_id] = Entry(order)

    def end(
        self, order_id: int, outcome: Outcome, now_s: float, *, happened: Happened | None = None, problem: str = ""
    ) -> Entry:
        """Raises KeyError when it is not under way."""
        begun = self._under_way.pop(order_id)
        entry = replace(begun, outcome=outcome, ended_s=now_s, happened=happened, problem=problem)
        self._ended.append(entry)
        kind = kind_of(entry.order.move)
        self.counts[kind, outcome] += 1
        if happened is not None:
            self.moved_bytes[kind, "weights"] += happened.weight_bytes
            self.moved_bytes[kind, "kv"] += happened.kv_bytes
            self.held_s += happened.held_s
        return entry


def kind_of(move: Move) -> str:
    """layers or heads."""
    return "layers" if isinstance(move, LayerMove) else "heads"
