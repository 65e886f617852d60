"""The controller at work over simulated workers, asked and ordered as real ones are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.moves.controller_loop import ControllerLoop
from kv.metrics import table
from kv.metrics.table import Readings
from migrate.controller_settings import ControllerSettings
from migrate.controller_view import move_from
from migrate.move_settings import MoveSettings
from migrate.moves import HeadMove, LayerMove
from migrate.verdict import Abilities
from migrate.worker_figures import WorkerFigures
from tests.actors.moves.simulated_cell import SimulatedCell
from tests.migrate.fleets import model, worker
from tests.migrate.simulated_fleet import SimulatedFleet

PLANNER = MoveSettings(period_s=1, window_s=1, busy_from=0, cool_down_s=4, compute_weight=1, memory_weight=0)
SETTINGS = ControllerSettings(PLANNER, abandon_after_s=10)


def always(**tokens_per_s: float) -> Callable[[float], Mapping[str, WorkerFigures]]:
    workers = {name: worker(name, prefill_tokens_per_s=rate) for name, rate in tokens_per_s.items()}
    return lambda _: workers


@dataclass
class World:
    cell: SimulatedCell
    loop: ControllerLoop
    exported: list[Readings] = field(default_factory=list)

    @classmethod
    def of(cls, traffic: Callable[[float], Mapping[str, WorkerFigures]]) -> World:
        cell, exported = SimulatedCell(SimulatedFleet(model(switch_s=0.5), traffic)), list[Readings]()
        return cls(
            cell,
            ControllerLoop(cell, SETTINGS, abilities=Abilities(), on_turn=exported.append, clock=cell.clock),
            exported,
        )

    async def turns(self, count: int) -> None:
        for _ in range(count):
            self.cell.advance(1.0)
            await asyncio.sleep(0)  # whoever waits for a move that has ended goes on
            await self.loop.turn()
            await asyncio.sleep(0)  # what was ordered reaches the workers

    async def history(self) -> list[tuple[Any, ...]]:
        entries = (await self.loop.status())["history"]
        return [(entry["move"]["text"], entry["cause"], entry["outcome"], entry["problem"]) for entry in entries]


BUSY = always(a=200, b=0)
LAST_TO_B = ("a", [3], None, "a", "b")
AWAY = "layers 2 to 3 of 'a' from 'a' to 'b'"


async def _follows_traffic() -> None:
    world = World.of(BUSY)
    await world.turns(4)
    assert await world.history() == [(AWAY, "plan", "done", None)]
    assert world.cell.fleet.placements["a"].layers_on("b") == (2, 3)
    world.cell.fleet.traffic = always(a=0, b=0)
    await world.turns(9)
    assert (await world.history())[0] == ("layers 2 to 3 of 'a' from 'b' to 'a'", "plan", "done", None)
    assert world.cell.fleet.placements["a"].is_home
    counted = world.exported[-1]
    assert counted[table.MOVES, ("layers", "done")] == 2
    assert counted[table.MOVE_HELD, ()] == pytest.approx(0.2)
    assert counted[table.MODULES_AWAY, ("layers",)] == counted[table.MOVES_UNDER_WAY, ()] == 0
    assert max(reading.get((table.MODULES_AWAY, ("layers",)), 0) for reading in world.exported) == 2
    assert (await world.loop.status())["workers"]["a"]["weighted"] == 0


def test_it_follows_traffic_by_what_workers_count() -> None:
    asyncio.run(_follows_traffic())


async def _goes_on_after_failures() -> None:
    world = World.of(BUSY)
    fates = iter(["fails", "hangs", "done"])
    world.cell.fleet.fate = lambda _: next(fates)  # type: ignore[assignment,return-value]
    await world.turns(30)
    assert await world.history() == [
        (AWAY, "plan", "done", None),
        (AWAY, "plan", "abandoned", "it has not ended within 10 s"),
        (AWAY, "plan", "failed", "the link died"),
    ]


def test_it_goes_on_after_moves_that_fail_or_hang() -> None:
    asyncio.run(_goes_on_after_failures())


async def _waits_for_workers() -> None:
    world = World.of(BUSY)
    world.cell.gone = "the control deployment restarts"
    assert "has just started" in (await world.loop.status())["unavailable"]
    await world.turns(3)
    for answer in (await world.loop.status(), await world.loop.plan(), await world.loop.order(*LAST_TO_B)):
        assert answer == {"unavailable": "the workers cannot be seen: the control deployment restarts"}
    world.cell.gone = ""
    await world.turns(4)
    assert world.cell.fleet.placements["a"].layers_on("b") == (2, 3)
    world.cell.gone = "it restarts again"
    assert "it restarts again" in (await world.loop.status())["unavailable"]


def test_it_waits_for_workers_that_cannot_be_asked() -> None:
    asyncio.run(_waits_for_workers())


async def _leaves_silent_workers_alone() -> None:
    world = World.of(BUSY)
    world.cell.silent = {"b"}
    await world.turns(4)
    assert await world.history() == []
    status = await world.loop.status()
    assert (set(status["workers"]), status["silent"]) == ({"a"}, ["b"])
    answer = await world.loop.order(*LAST_TO_B)
    assert answer["refused"]["reason"] == "does not answer"
    assert (await world.loop.order("a", [3], None, "a", "c"))["refused"]["reason"] == "unknown worker"
    world.cell.silent, world.cell.busy = set(), {"a": "what somebody else wants of it"}
    await world.turns(3)
    assert await world.history() == []
    assert (await world.loop.status())["workers"]["a"]["busy"] == "what somebody else wants of it"


def test_silent_and_busy_workers_are_left_alone() -> None:
    asyncio.run(_leaves_silent_workers_alone())


async def _takes_orders() -> None:
    world = World.of(always(a=0, b=0))
    await world.turns(2)
    assert "too few steps" in (await world.loop.plan())["unavailable"]
    answer = await world.loop.order("a", [3, 1], None, "a", "b")
    assert "give a contiguous ascending run" in answer["invalid"]
    answer = await world.loop.order(*LAST_TO_B)
    assert answer["order"]["outcome"] == "under way"
    again = await world.loop.order(*LAST_TO_B)
    assert again["refused"]["reason"] == "in flight"
    await world.turns(2)
    ((text, cause, outcome, _),) = await world.history()
    assert (text, cause, outcome) == ("layer 3 of 'a' from 'a' to 'b'", "hand", "done")
    status = await world.loop.status()
    assert status["placements"][0]["layers"] == {"a": [0, 1, 2], "b": [3]}
    assert status["workers"]["b"]["state"] == {"under_way": None, "pool_blocks": 100}
    await world.loop.home()
    await world.turns(3)
    assert world.cell.fleet.placements["a"].is_home
    assert not (await world.loop.status())["bringing_home"]


async def _is_not_home_while_a_home_is_silent() -> None:
    world = World.of(always(a=0, b=0))
    await world.turns(2)
    await world.loop.order("b", [3], None, "b", "a")
    await world.turns(2)
    world.cell.silent = {"b"}
    await world.turns(1)
    await world.loop.home()
    await world.turns(2)
    assert (await world.loop.status())["bringing_home"]
    world.cell.silent = set()
    await world.turns(4)
    assert world.cell.fleet.placements["b"].is_home
    assert not (await world.loop.status())["bringing_home"]


def test_a_home_that_does_not_answer_may_have_modules_away() -> None:
    asyncio.run(_is_not_home_while_a_home_is_silent())


def test_it_takes_orders() -> None:
    asyncio.run(_takes_orders())


async def _a_dry_run_explains() -> None:
    world = World.of(BUSY)
    world.loop.use_settings(SETTINGS.changed({"automatic": False}))
    await world.turns(3)
    made = await world.loop.plan()
    assert [move["text"] for move in made["moves"]] == [AWAY]
    assert {len(verdict["move"]["layers"]): verdict["reason"] for verdict in made["verdicts"]} == {
        1: "not the best",
        2: "accepted",
        3: "new peak",
    }
    assert made["verdicts"][1]["prediction"]["after"]["b"]["weighted"] == pytest.approx(0.4)
    assert made["mean"] == pytest.approx(0.4)
    assert await world.history() == []
    world.loop.use_settings(SETTINGS)
    await world.turns(2)
    assert len(await world.history()) == 1


def test_a_dry_run_explains_and_begins_nothing() -> None:
    asyncio.run(_a_dry_run_explains())


async def _runs_by_itself() -> None:
    world = World.of(BUSY)
    world.loop.use_settings(SETTINGS.changed({"period_s": 3600.0}))
    world.cell.advance(1.0)
    world.loop.start()
    while not world.exported:
        await asyncio.sleep(0)
    world.cell.advance(1.0)
    # A period of an hour is over at once when it is one of a second now.
    world.loop.use_settings(SETTINGS.changed({"period_s": 1800.0}))
    await asyncio.sleep(0.01)
    assert len(world.exported) == 1
    world.loop.use_settings(SETTINGS.changed({"period_s": 1.0}))
    while len(world.exported) < 2 or not world.cell.waiting:
        await asyncio.sleep(0)
    assert world.loop.failure is None
    await world.loop.stop()
    assert world.loop.failure is None
    assert world.cell.waiting[0][1].cancelled()


def test_it_runs_by_itself_and_stops() -> None:
    asyncio.run(_runs_by_itself())


def test_a_move_is_read_as_it_is_shown() -> None:
    assert move_from("a", [1, 2], None, "a", "b") == LayerMove("a", 1, 2, "a", "b")
    assert move_from("a", [1, 3], [0], "a", "b") == HeadMove("a", (1, 3), (0,), "a", "b")
    for layers in ([], [1, 3], [2, 1], [1, 1]):
        with pytest.raises(ValueError, match="give a contiguous ascending run"):
            move_from("a", layers, None, "a", "b")
