"""Workers on simulated time behind the methods by which a controller reaches real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from migrate.move_history import Cause, Happened, Order
from migrate.move_settings import MoveSettings
from migrate.moves import Move
from migrate.placement import Placement
from migrate.prediction import predict
from migrate.step_times import StepTimes
from migrate.worker_reading import WorkerReading
from tests.migrate.simulated_fleet import SimulatedFleet


@dataclass(frozen=True, slots=True)
class State:
    placement: Placement
    under_way: str | None = None
    pool_blocks: int = 100


class RefusedError(Exception):
    """As a worker's, with a text."""


@dataclass
class SimulatedCell:
    """Counts as workers do: what their traffic makes of it, and steps that cost what the fleet's model says."""

    fleet: SimulatedFleet
    now_s: float = 0.0
    readings_by_worker: dict[str, WorkerReading] = field(default_factory=dict)
    waiting: list[tuple[Order, asyncio.Future[Happened]]] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Workers that answer nothing."""
    gone: str = ""
    """Why nobody can be asked."""
    busy: dict[str, str] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Time goes by: traffic is served, and moves end."""
        for name, figures in self.fleet.traffic(self.now_s).items():
            before = self.readings_by_worker.get(name) or self._first(name)
            tokens = int(figures.prefill_tokens_per_s * seconds)
            times = before.step_times.scaled(1.0)
            for number in range(40 if tokens else 0):
                each = 1 + number % 9
                per_token_s = self.fleet.cost.times.prefill_token_s * self.fleet.cost.sizes.num_layers
                times.count(
                    prefill_tokens=each, decode_rows=0, prefill_pairs=0, decode_pairs=0, layers_s=each * per_token_s
                )
            self.readings_by_worker[name] = WorkerReading(
                name,
                before.taken_s + seconds,
                self.fleet.cost.sizes,
                figures.memory_bytes,
                full_batch=8,
                total_blocks=figures.total_blocks,
                live_blocks=figures.live_blocks,
                prefill_tokens=before.prefill_tokens + tokens,
                step_times=times,
            )
        self.now_s += seconds
        for order, result in self.fleet.ended(self.now_s):
            for waiting, future in self.waiting:
                if waiting is order and not future.done():
                    if isinstance(result, str):
                        future.set_exception(RefusedError(f"Traceback (of another process)\n{result}"))
                    else:
                        future.set_result(result)

    def _first(self, name: str) -> WorkerReading:
        return WorkerReading(name, 0.0, self.fleet.cost.sizes, 1, 8, 100, step_times=StepTimes())

    async def readings(self) -> Sequence[WorkerReading]:
        if self.gone:
            raise ConnectionError(self.gone)
        alive = self.fleet.traffic(self.now_s).keys() - self.silent
        return [reading for name, reading in self.readings_by_worker.items() if name in alive]

    async def placements(self) -> Mapping[str, State | None]:
        if self.gone:
            raise ConnectionError(self.gone)
        placements = self.fleet.observe(self.now_s).fleet.placements
        states = {home: State(placement, self.busy.get(home)) for home, placement in placements.items()}
        return {home: None if home in self.silent else state for home, state in states.items()}

    async def order_move(self, move: Move, home: str) -> Happened:
        assert home == move.instance
        fleet = self.fleet.observe(self.now_s).fleet
        prediction = predict(fleet, move, MoveSettings())
        order = Order(len(self.waiting), move, Cause.PLAN, "", self.now_s, prediction)
        refusal = self.fleet.begin(order, self.now_s)
        if refusal is not None:
            raise RefusedError(refusal)
        future: asyncio.Future[Happened] = asyncio.get_running_loop().create_future()
        self.waiting.append((order, future))
        try:
            return await future
        except asyncio.CancelledError:
            self.fleet.stop(order)
            raise
