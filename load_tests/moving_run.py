"""Orders one move after the other under a load that others make, and looks at the workers around each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from load_tests.measured_run import report_progress
from load_tests.move_effects import Freed, StepsAfter, freed, link_bytes, steps_after
from load_tests.ordered_move import Desk, Made, MovesStuckError
from migrate.controller_view import move_view
from migrate.moves import Move


class NotFitError(Exception):
    """The application is not one whose moves can be measured; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What does not change while moves are made."""

    workers: tuple[str, ...]
    """By turns of prefill and decode, as far as there are both, so that neighbours differ."""
    num_layers: int
    num_kv_heads: int
    layer_bytes: int
    """Of one layer's weights."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A move with what it did. What was not looked at is None: of a move that came to nothing."""

    made: Made
    refused: int
    """How often it was refused before, for want of room at that time."""
    freed: Freed | None = None
    steps: StepsAfter | None = None
    link_bytes: int | None = None

    @property
    def is_done(self) -> bool:
        return self.made.happened is not None

    def as_row(self) -> dict[str, Any]:
        """One flat record but for the parts' own."""
        made = self.made
        return {
            **{name: value for name, value in move_view(made.move).items() if name in ("text", "kind")},
            "is_out": made.move.source == made.move.instance,
            "took_s": round(made.ended_s - made.begun_s, 3),
            "refused": self.refused,
            "problem": made.problem or None,
            "predicted": made.predicted
            and {name: made.predicted[name] for name in ("weight_bytes", "kv_bytes", "transfer_s")},
            "happened": made.happened,
            "freed": self.freed and asdict(self.freed),
            "steps_after": self.steps and asdict(self.steps),
            "link_bytes": self.link_bytes,
        }


@dataclass(slots=True)
class MovesMade:
    """All of one run."""

    moves: list[Observed] = field(default_factory=list)
    stuck: str | None = None
    """Why no more were made, if they did not end as planned."""
    repairs: int = 0
    """How often a worker took a lost host's layers home meanwhile, which nobody should have to."""


async def fleet_of(desk: Desk, model: str) -> Fleet:
    """Raises NotFitError, and what `Desk` does. `model`: what the application's `model` says."""
    from actors.engine.model_spec import read_model_spec
    from actors.model_source import resolve_model

    status = await desk.first_status()
    if status["automatic"]:
        raise NotFitError("moves are made automatically: set moves.automatic: false")
    if any(status["modules_away"].values()) or status["under_way"]:
        raise NotFitError("something is away from home or moves: python -m migrate.ctl home")
    spec = read_model_spec(Path(resolve_model(model).path))
    names = sorted(status["workers"])
    layers = {len(placement["layers"][placement["instance"]]) for placement in status["placements"]}
    if len(names) < 2 or layers != {spec.num_layers}:
        raise NotFitError(
            f"there are {len(names)} workers with {sorted(layers)} layers each, and {model!r} has {spec.num_layers}: "
            "start at least two workers, and name the model that they serve"
        )
    status = await desk.status_of(names)
    weights = {status["workers"][name]["state"]["weight_bytes"] for name in names}
    by_turns = sorted(names, key=lambda name: (names.index(name) - _first_of_role(names, name), name))
    return Fleet(tuple(by_turns), spec.num_layers, spec.num_kv_heads, max(weights) // spec.num_layers)


async def make_moves(
    desk: Desk, fleet: Fleet, moves: Iterable[Move], *, dwell_s: float, attempts: int, made: MovesMade
) -> None:
    """Makes them one by one, and tells `made` of each. Between two `dwell_s` pass. One that is refused for want of room
    is tried so many times; one that takes back what did not leave is left out."""
    away: set[str] = set()
    try:
        before = await desk.status_of(fleet.workers)
        repairs = _repairs(before)
        for move in moves:
            if move.source != move.instance and move.instance not in away:
                continue
            observed, before = await _make(desk, fleet, move, before, dwell_s, attempts)
            made.moves.append(observed)
            made.repairs = _repairs(before) - repairs
            report_progress(f"{len(made.moves)}: {move}: {observed.made.problem or 'done'}")
            if observed.is_done:
                (away.add if move.source == move.instance else away.discard)(move.instance)
    except MovesStuckError as error:
        made.stuck = str(error)
        report_progress(made.stuck)


async def _make(
    desk: Desk, fleet: Fleet, move: Move, before: dict[str, Any], dwell_s: float, attempts: int
) -> tuple[Observed, dict[str, Any]]:
    """The move, and what the workers say some time after it."""
    made, refused = await desk.make(move), 0
    while made.may_come_later and refused + 1 < attempts:
        refused += 1
        await asyncio.sleep(dwell_s)
        before = await desk.status_of(fleet.workers)
        made = await desk.make(move)
    after = await desk.status_of(fleet.workers)
    await asyncio.sleep(dwell_s)
    later = await desk.status_of(fleet.workers)
    if made.happened is None:
        return Observed(made, refused), later
    effects = freed(move, before, after, fleet.layer_bytes, fleet.num_kv_heads)
    return Observed(made, refused, effects, steps_after(move, after, later), link_bytes(move, before, after)), later


def _first_of_role(names: Sequence[str], name: str) -> int:
    role = name.split("-")[0]
    return next(place for place, other in enumerate(names) if other.split("-")[0] == role)


def _repairs(status: dict[str, Any]) -> int:
    return sum(worker["state"]["repairs"] for worker in status["workers"].values() if "state" in worker)
