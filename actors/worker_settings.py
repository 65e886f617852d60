"""What a Worker is created with. Plain data, made from the app's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from actors.engine.config import EngineConfig
from migrate.load import Role

TURN_S: Final = 10.0
"""For what a worker answers between two turns of its engine."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """Time limits where layers move between workers; the same for all of an application."""

    link_timeout_s: float = 10.0
    """See `LinkSettings.timeout_s`."""
    answer_timeout_s: float = 30.0
    """A peer that has not answered by then, or run its part of a step, is lost."""
    move_timeout_s: float = 60.0
    """A move that is not made by then is given up."""

    @property
    def order_s(self) -> float:
        """The longest that an order of a move is waited for: a link, the move, an answer, and a turn of an engine."""
        return 2 * self.link_timeout_s + self.move_timeout_s + self.answer_timeout_s + TURN_S


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker's."""

    model: str
    """As `actors.model_source` takes it."""
    role: Role
    engine: EngineConfig
    torch_threads: int
    """Of its operators on the CPU, the engine's own thread included."""
    lease_s: float
    """How long a hold on stored KV lasts; it is renewed three times in that time."""
    fetch_timeout_s: float
    """For a look-up, and for all of a request's fetch: what has not come by then is computed."""
    pull_timeout_s: float = 5.0
    """The store's own limit for taking a request's parts over."""
    share_prefixes: bool = True
    """Whether prompts are looked up in the store; False: only what was handed over is, and answers are not stored."""
    max_publishing_answers: int = 8
    """Ended answers of a decode worker whose blocks the store takes over at a time, at most; those that end meanwhile
    are not stored. 0: answers are never stored."""
    prefill_tokens_per_s: float = 1000.0
    """Prior of the measured rate."""
    owner_silence_s: float = 10.0
    """An ingress that has not asked for so long is gone; its requests are freed."""
    moves: MoveLimits | None = None
    """None: layers stay at home, and nothing is paid for it."""
    epoch: int = 0
    """Of the worker id in the roster. Every replica has an id of its own, so its first life is its only one."""
