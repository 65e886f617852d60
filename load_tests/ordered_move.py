"""Orders moves of a running application by its routes and waits for their ends, as `python -m migrate.ctl` does."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from load_tests.driver import clock_s
from migrate.controller_view import move_view
from migrate.ctl.client import Client, NotYetError, RefusedError, UnreachableError
from migrate.moves import Move

_ASK_EVERY_S = 0.25
_MAY_COME_LATER = "later"
"""In what a worker says of a move for which there is no room now."""

Json = dict[str, Any]


class MovesStuckError(Exception):
    """A move had no end in time."""


@dataclass(frozen=True, slots=True)
class Made:
    """A move that was ordered, with what it took."""

    move: Move
    begun_s: float
    """On `clock_s`, as the end."""
    ended_s: float
    predicted: Json | None
    happened: Json | None
    """None: it came to nothing."""
    problem: str = ""

    @property
    def may_come_later(self) -> bool:
        """Whether it was refused, by the controller or for want of room that requests have, and nothing is wrong."""
        return self.happened is None and (self.predicted is None or _MAY_COME_LATER in self.problem)


class Desk:
    """One application's. Raises what `Client` does where it does not answer as it should."""

    def __init__(self, base_url: str, api_key: str | None, move_limit_s: float) -> None:
        self._client = Client(base_url, api_key, 60.0)
        self._limit_s = move_limit_s

    async def status(self) -> Json:
        """What `GET /debug/moves` answers."""
        return await asyncio.to_thread(self._client.get, "/debug/moves")

    async def first_status(self) -> Json:
        """The same of an application that may have started just now: its controller knows of no worker before it has
        asked once. Whatever else is wrong is raised at once."""
        return await self._patient_status(clock_s(), NotYetError)

    async def status_of(self, workers: Collection[str]) -> Json:
        """The same, once it has what each of these says of itself: a worker in a long step may be late. Raises
        MovesStuckError."""
        begun_s = clock_s()
        while True:
            status = await self._patient_status(begun_s)
            missing = [name for name in workers if "state" not in status["workers"].get(name, {})]
            if not missing:
                return status
            if clock_s() - begun_s > self._limit_s:
                raise MovesStuckError(f"nothing has come of {', '.join(missing)} for {self._limit_s:g} s")
            await asyncio.sleep(_ASK_EVERY_S)

    async def make(self, move: Move) -> Made:
        """Orders a move and returns when it has ended, well or not. Raises MovesStuckError."""
        view, begun_s = move_view(move), clock_s()
        body = {name: view[name] for name in ("instance", "layers", "heads", "source", "destination")}
        try:
            entry = (await asyncio.to_thread(self._client.post, "/debug/moves", body))["order"]
        except RefusedError as error:
            return Made(move, begun_s, clock_s(), None, None, str(error))
        while entry["outcome"] == "under way":
            if clock_s() - begun_s > self._limit_s:
                raise MovesStuckError(f"{move} had no end within {self._limit_s:g} s")
            await asyncio.sleep(_ASK_EVERY_S)
            status, now_s = await self._patient_status(begun_s), clock_s()
            known = {each["order_id"]: each for each in status["under_way"] + status["history"]}
            if entry["order_id"] not in known:
                raise MovesStuckError(f"{move}: the controller was replaced, and knows of no such order")
            entry = known[entry["order_id"]]
        begun_s, ended_s = now_s - entry["begun_ago_s"], now_s - entry["ended_ago_s"]
        return Made(move, begun_s, ended_s, entry["predicted"], entry["happened"], entry["problem"] or "")

    async def bring_home(self) -> None:
        """Returns when everything is home. Raises MovesStuckError."""
        begun_s = clock_s()
        await asyncio.to_thread(self._client.post, "/debug/moves/home", {})
        while (status := await self._patient_status(begun_s))["bringing_home"]:
            if clock_s() - begun_s > self._limit_s:
                raise MovesStuckError(f"not everything is home within {self._limit_s:g} s: {status['modules_away']}")
            await asyncio.sleep(_ASK_EVERY_S)

    async def _patient_status(self, since_s: float, late: type[UnreachableError] = UnreachableError) -> Json:
        """The status; a controller that is late, as under load it may be, is asked again until the limit."""
        while True:
            try:
                return await self.status()
            except late:
                if clock_s() - since_s > self._limit_s:
                    raise
                await asyncio.sleep(_ASK_EVERY_S)
