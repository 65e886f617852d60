"""A controller at work: asks workers once a period, has its orders carried out, and answers people.

The thinking is in `migrate.controller`; here are the clock, the waiting and what can fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from kv.metrics.table import Readings
from migrate.controller import Controller, MoveRefusedError, Observation
from migrate.controller_metrics import controller_readings
from migrate.controller_settings import ControllerSettings
from migrate.controller_view import Json, entry_view, move_from, plan_view, status_view, verdict_view
from migrate.fleet import Fleet
from migrate.move_history import Entry, Happened, Order
from migrate.moves import Move
from migrate.observer import Observer
from migrate.placement import Placement
from migrate.verdict import Abilities
from migrate.worker_reading import WorkerReading

logger = logging.getLogger("ray.serve")


class _NothingSeenError(Exception):
    """There is nothing to answer from yet. The message says why."""


class State(Protocol):
    """What a worker says of where its instance lies."""

    @property
    def placement(self) -> Placement: ...

    @property
    def under_way(self) -> str | None:
        """The move or repair of its instance that it is at, in words."""


class Report(Protocol):
    """What a move took."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes(self) -> int: ...

    @property
    def duration_s(self) -> float: ...

    @property
    def held_s(self) -> float: ...


class Cell(Protocol):
    """The workers, as a controller reaches them. Each call ends within seconds, but for a move."""

    async def readings(self) -> Sequence[WorkerReading]:
        """Of the workers that answer."""

    async def placements(self) -> Mapping[str, State | None]:
        """By worker that is alive; None where it does not answer."""

    async def order_move(self, move: Move, home: str) -> Report:
        """Returns when it is done. Raises whatever is the reason that it is not. Cancelled, it is to be given up."""


class ControllerLoop:
    """Runs from `start` to `stop`, in one event loop. `on_turn` gets the metrics' readings after each period."""

    def __init__(
        self,
        cell: Cell,
        settings: ControllerSettings,
        *,
        abilities: Abilities,
        on_turn: Callable[[Readings], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controller = Controller(settings, abilities)
        self._cell = cell
        self._on_turn = on_turn
        self._clock = clock
        self._begun_s = clock()
        self._observer = Observer()
        self._seen: Observation | None = None
        self._states: Mapping[str, State | None] = {}
        self._blind = "the controller has just started; wait for a period"
        self._moving: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._has_settings = asyncio.Event()

    def start(self) -> None:
        """Begins to look and to plan."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends. Moves under way are given up, which before their switch leaves everything as it was."""
        tasks = [task for task in (self._task, *self._moving.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def failure(self) -> BaseException | None:
        """Why it has ended by itself, if it has."""
        if self._task is None or not self._task.done() or self._task.cancelled():
            return None
        return self._task.exception()

    def use_settings(self, settings: ControllerSettings) -> None:
        """From now on. What is under way goes on."""
        self.controller.settings = settings
        self._has_settings.set()

    async def turn(self) -> None:
        """One period's work: what took too long is given up, the workers are asked, and what is planned is begun."""
        for order in self.controller.give_up(self._clock()):
            logger.warning("order %d is given up: %s", order.order_id, order.move)
            if order.order_id in self._moving:
                self._moving[order.order_id].cancel()
        asked_s, window_s = self._clock(), self.controller.settings.planner.window_s
        try:
            states, readings = await asyncio.gather(self._cell.placements(), self._cell.readings())
            placements = {name: None if state is None else state.placement for name, state in states.items()}
            seen = self._observer.look(readings, placements, asked_s, window_s)
        except Exception as error:  # whoever knows the workers restarts, or is gone: another period, another try
            self._blind, self._seen = f"the workers cannot be seen: {_text_of(error)}", None
            logger.warning("%s", self._blind)
            return
        self._states = states
        if isinstance(seen, str):
            self._blind, self._seen = seen, None
        else:
            self._seen = _with_states(seen, states, asked_s)
            self._carry_out(self.controller.plan(self._seen, self._clock()))
        self._on_turn(controller_readings(self.controller, self._seen))

    async def status(self) -> Json:
        """Where everything is, and the history, with how long this controller has run: another one knows nothing of
        earlier orders. Or `unavailable` says why there is nothing to answer from."""
        try:
            seen = await self._look_again()
        except _NothingSeenError as error:
            return {"unavailable": str(error)}
        view = status_view(self.controller, seen, self._clock())
        view["running_s"] = self._clock() - self._begun_s
        for name, worker in view["workers"].items():
            state: Any = self._states.get(name)
            if is_dataclass(state):
                worker["state"] = {key: value for key, value in asdict(state).items() if key != "placement"}  # type: ignore[arg-type]
        return view

    async def plan(self) -> Json:
        """What would be planned now, with a verdict on every candidate; or `unavailable`."""
        try:
            return plan_view(self.controller.dry_run(await self._look_again(), self._clock()))
        except (_NothingSeenError, ValueError) as error:
            return {"unavailable": str(error)}

    async def order(
        self, instance: str, layers: Sequence[int], heads: Sequence[int] | None, source: str, destination: str
    ) -> Json:
        """A person's order: `order` is what has begun; `refused` the verdict on one that cannot be made; `invalid` says
        why it is no move at all; or `unavailable`."""
        try:
            move = move_from(instance, layers, heads, source, destination)
        except ValueError as error:
            return {"invalid": str(error)}
        try:
            order = self.controller.order(move, await self._look_again(), self._clock())
        except _NothingSeenError as error:
            return {"unavailable": str(error)}
        except MoveRefusedError as error:
            return {"refused": verdict_view(error.verdict)}
        self._carry_out([order])
        return {"order": entry_view(Entry(order), self._clock())}

    async def home(self) -> Json:
        """Everything is sent home, piece by piece; `status` tells when that is done."""
        self.controller.bring_home()
        # What cannot begin at once has its turn in the periods to come.
        with contextlib.suppress(_NothingSeenError):
            self._carry_out(self.controller.plan(await self._look_again(), self._clock()))
        return {"bringing_home": True}

    async def _run(self) -> None:
        while True:
            begun_s = self._clock()
            await self.turn()
            while (left_s := begun_s + self.controller.settings.planner.period_s - self._clock()) > 0:
                self._has_settings.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._has_settings.wait()
            await asyncio.sleep(0)  # a turn that took a period is no reason to keep others from theirs

    async def _look_again(self) -> Observation:
        """The last period's traffic over placements as they are now."""
        if self._seen is None:
            raise _NothingSeenError(self._blind)
        asked_s = self._clock()
        try:
            self._states = await self._cell.placements()
        except Exception as error:  # as in `turn`
            raise _NothingSeenError(f"the workers cannot be seen: {_text_of(error)}") from error
        return _with_states(self._seen, self._states, asked_s)

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            logger.info("order %d (%s): %s: %s", order.order_id, order.cause, order.move, order.why)
            self._moving[order.order_id] = asyncio.create_task(self._see_through(order))

    async def _see_through(self, order: Order) -> None:
        """Cancelled, it has no end of its own: whether the workers have stopped is not known then."""
        result: Happened | str
        try:
            report = await self._cell.order_move(order.move, order.move.instance)
            result = Happened(report.weight_bytes, report.kv_bytes, report.duration_s, report.held_s)
            move, expected = order.move, order.prediction
            self._observer.links.moved(move.source, move.destination, result, expected.busy_before, expected.turns_s)
            logger.info("order %d is done in %.2f s", order.order_id, report.duration_s)
        except Exception as error:  # a refusal, a dead link, a worker that is gone: the books say so
            result = _text_of(error)
            logger.warning("order %d came to nothing: %s", order.order_id, result)
        finally:
            del self._moving[order.order_id]
        self.controller.ended(order.order_id, self._clock(), result)


def _with_states(seen: Observation, states: Mapping[str, State | None], asked_s: float) -> Observation:
    """The same traffic, with what workers have just said of where their instances lie."""
    told = {name: state for name, state in states.items() if state is not None}
    placements = {**seen.fleet.placements, **{name: state.placement for name, state in told.items()}}
    figures = [item for name, item in seen.fleet.figures.items() if name in states]
    fleet = Fleet.of(figures, [placements[item.worker] for item in figures], seen.fleet.model)
    busy = {name: state.under_way for name, state in told.items() if state.under_way is not None}
    silent = (seen.silent & states.keys()) | (states.keys() - (told.keys() & fleet.figures.keys()))
    return Observation(fleet, asked_s, seen.not_planned, busy, frozenset(silent))


def _text_of(error: Exception) -> str:
    """In one line. An error of another process brings its whole stack along, and the one that it was as `cause`."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return lines[-1] if lines else type(cause).__name__
