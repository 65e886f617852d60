"""The controller of moves as a Serve deployment: one replica, which needs no memory and may be replaced at any time.

Its settings come with the application. `user_config` of the deployment changes them while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ray import serve
from ray.exceptions import RayError

from actors.addresses import RosterView, address_of
from actors.moves.controller_loop import ControllerLoop, Report, State
from kv.metrics.ray_exporter import RayExporter
from migrate.controller_settings import ControllerSettings
from migrate.controller_view import Json
from migrate.moves import Move
from migrate.verdict import Abilities
from migrate.worker_reading import WorkerReading

ABILITIES: Final = Abilities(heads=True, onward=False)
"""Of `Worker.move`."""
_ANSWER_TIMEOUT_S = 5.0
"""A worker that takes longer, in a step for instance, is left out of one period."""
_CONTROL_TIMEOUT_S = 15.0
"""The control deployment asks every worker in its turn."""

logger = logging.getLogger("ray.serve")


@serve.deployment
class ControllerServer:
    """See the module."""

    async def __init__(self, settings: ControllerSettings, control: Any) -> None:  # type: ignore[misc]  # Serve awaits
        """`control`: Serve handle of the control deployment."""
        self._first = settings
        self._refused_config = ""
        self._loop = ControllerLoop(RayCell(control), settings, abilities=ABILITIES, on_turn=RayExporter().export)
        self._loop.start()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Settings of the application with these in place of theirs. One that cannot be used changes nothing: a
        controller that failed for it would be replaced by one that fails too."""
        try:
            self._loop.use_settings(self._first.changed(user_config))
            self._refused_config = ""
        except ValueError as error:
            self._refused_config = str(error)
            logger.error("user_config is refused, and the settings stay as they were: %s", error)

    async def status(self) -> Json:
        """See `ControllerLoop`, as for the following ones."""
        return {**await self._loop.status(), "refused_settings": self._refused_config or None}

    async def plan(self) -> Json:
        return await self._loop.plan()

    async def order(
        self, instance: str, layers: Sequence[int], heads: Sequence[int] | None, source: str, destination: str
    ) -> Json:
        return await self._loop.order(instance, layers, heads, source, destination)

    async def home(self) -> Json:
        return await self._loop.home()

    async def check_health(self) -> None:
        """Serve asks now and then; raising replaces the replica."""
        if self._loop.failure is not None:
            raise RuntimeError("the controller has ended") from self._loop.failure

    async def __del__(self) -> None:
        """Serve calls this when it stops the replica."""
        await self._loop.stop()


class RayCell:
    """The workers of one application, by way of its control deployment."""

    def __init__(self, control: Any) -> None:
        self._control = control

    async def readings(self) -> Sequence[WorkerReading]:
        """See `Cell`."""
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            roster: RosterView = await self._control.watch.remote(-1, 0.0)
        asked = [self._reading(address_of(member).actor) for member in roster.members]
        return [reading for reading in await asyncio.gather(*asked) if reading is not None]

    async def placements(self) -> Mapping[str, State | None]:
        """See `Cell`."""
        async with asyncio.timeout(_CONTROL_TIMEOUT_S):
            states: Mapping[str, State | None] = await self._control.placements.remote()
        return states

    async def order_move(self, move: Move, home: str) -> Report:
        """See `Cell`."""
        response = self._control.order_move.remote(move, home)
        try:
            report: Report = await response
        except asyncio.CancelledError:
            response.cancel()  # else it would go on there without anybody who waits for it
            raise
        return report

    async def _reading(self, worker: Any) -> WorkerReading | None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                reading: WorkerReading = await worker.reading.remote()
        except (RayError, TimeoutError):
            return None
        return reading
