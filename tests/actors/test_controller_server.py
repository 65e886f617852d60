"""The deployment's own part, without Serve: settings that change, and workers behind actor handles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.addresses import RosterView, WorkerAddress
from actors.controller_server import ControllerServer, RayCell
from actors.messages import WorkerFacts
from kv.layout import KvLayout
from migrate.controller_settings import ControllerSettings
from migrate.move_history import Happened
from migrate.moves import LayerMove
from migrate.roster import Member
from tests.actors.moves.simulated_cell import SimulatedCell
from tests.migrate.fleets import model, worker
from tests.migrate.simulated_fleet import SimulatedFleet

FACTS = WorkerFacts(KvLayout(4, 4, 8, 16, "float32"), b"f" * 16, 100, 100, 500, (2,), "torch", "cpu")


class Server(ControllerServer.func_or_class):  # type: ignore[name-defined,misc]
    """As Serve runs it, but that nobody stops it behind the test's back."""

    stop = ControllerServer.func_or_class.__del__

    def __del__(self) -> None:
        return

    @classmethod
    async def of(cls, settings: ControllerSettings, control: Control) -> Server:
        server = cls.__new__(cls)
        await server.__init__(settings, control)
        return server


class Response:
    """What a Serve handle's call returns."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        self._answer = answer
        self.is_cancelled = False

    def __await__(self) -> Any:
        return self._answer.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Remote:
    """A method of a handle."""

    function: Callable[..., Awaitable[Any]]
    responses: list[Response] = field(default_factory=list)

    def remote(self, *arguments: Any) -> Response:
        self.responses.append(Response(self.function(*arguments)))
        return self.responses[-1]


@dataclass
class WorkerHandle:
    reading: Remote


class Control:
    """The control deployment's methods, over simulated workers."""

    def __init__(self, cell: SimulatedCell) -> None:
        self.cell = cell
        self.dead: set[str] = set()
        self.watch, self.placements, self.order_move = (
            Remote(self._watch),
            Remote(cell.placements),
            Remote(cell.order_move),
        )

    async def _watch(self, version: int, timeout_s: float) -> RosterView:
        assert (version, timeout_s) == (-1, 0.0)
        return RosterView(1, tuple(self._member(name) for name in self.cell.readings_by_worker), None)

    def _member(self, name: str) -> Member:
        async def reading() -> Any:
            if name in self.dead:
                raise RayActorError
            return self.cell.readings_by_worker[name]

        handle: Any = WorkerHandle(Remote(reading))
        return Member(name, 0, "prefill", "node", b"f" * 16, 16, 100, 100, WorkerAddress(handle, FACTS))


def control(**tokens_per_s: float) -> Control:
    workers = {name: worker(name, prefill_tokens_per_s=rate) for name, rate in tokens_per_s.items()}
    control = Control(SimulatedCell(SimulatedFleet(model(), lambda _: workers)))
    control.cell.advance(1.0)
    return control


async def _settings_change() -> None:
    server = await Server.of(ControllerSettings(), control(a=200, b=0))
    try:
        while "unavailable" in (status := await server.status()):
            await asyncio.sleep(0)
        assert (status["settings"]["rho"], status["settings"]["automatic"]) == (1.5, True)
        await server.reconfigure({"rho": 4, "automatic": False})
        status = await server.status()
        assert (status["settings"]["rho"], status["settings"]["automatic"]) == (4, False)
        assert status["refused_settings"] is None
        # What cannot be used changes nothing, and is shown until something better comes.
        await server.reconfigure({"rho": 0.1})
        status = await server.status()
        assert status["settings"]["rho"] == 4
        assert "rho is 0.1" in status["refused_settings"]
        # What a new one does not name is again what the application said.
        await server.reconfigure({"cool_down_s": 1})
        status = await server.status()
        assert (status["settings"]["rho"], status["settings"]["cool_down_s"]) == (1.5, 1)
        assert status["refused_settings"] is None
        assert (await server.order("a", [3], None, "a", "x"))["refused"]["reason"] == "unknown worker"
        assert await server.home() == {"bringing_home": True}
        assert "unavailable" in await server.plan()
        await server.check_health()
    finally:
        await server.stop()


def test_settings_change_while_it_runs() -> None:
    asyncio.run(_settings_change())


async def _asks_who_lives() -> None:
    fleet = control(a=200, b=0, c=0)
    fleet.dead = {"b"}
    cell = RayCell(fleet)
    assert [reading.worker for reading in await cell.readings()] == ["a", "c"]
    assert set(await cell.placements()) == {"a", "b", "c"}


def test_who_does_not_answer_is_left_out() -> None:
    asyncio.run(_asks_who_lives())


async def _orders() -> None:
    fleet = control(a=200, b=0)
    ordered = asyncio.create_task(RayCell(fleet).order_move(LayerMove("a", 3, 1, "a", "b"), "a"))
    await asyncio.sleep(0)
    fleet.cell.advance(1.0)
    assert isinstance(await ordered, Happened)
    assert fleet.cell.fleet.placements["a"].layers_on("b") == (3,)

    fleet.cell.fleet.fate = lambda _: "hangs"
    ordered = asyncio.create_task(RayCell(fleet).order_move(LayerMove("a", 2, 1, "a", "b"), "a"))
    await asyncio.sleep(0)
    ordered.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ordered
    assert [response.is_cancelled for response in fleet.order_move.responses] == [False, True]


def test_an_order_is_carried_out_or_taken_back() -> None:
    asyncio.run(_orders())


async def _ends() -> None:
    broken: Any = None  # settings that no application can have: the loop cannot go on
    server = await Server.of(broken, control(a=0))
    while server._loop.failure is None:
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="the controller has ended"):
        await server.check_health()
    await server.stop()


def test_one_that_has_ended_by_itself_is_not_healthy() -> None:
    asyncio.run(_ends())
