"""An ingress's view of the roster while the control replica comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException

from actors.addresses import RosterView
from app.roster_watch import RosterWatch
from migrate.roster import Member, Roster
from tests.plain_worker import PlainWorker, until

NEVER_S = 1000.0


class PlainControl:
    """The control deployment's handle, over a real roster. Its replica can be lost, and is replaced by an empty one."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.suspects: list[str] = []
        self.replace()

    def replace(self) -> None:
        self.has_failed = asyncio.Event()
        self._roster = Roster()
        self._changed = asyncio.Event()
        self.fails = None

    def lose(self, error: Exception) -> None:
        self.fails = error
        self._changed.set()

    def join(self, *members: Member) -> None:
        for member in members:
            self._roster.join(member)
        self._changed.set()

    def leave(self, member: Member) -> None:
        self._roster.leave(member.worker_id, member.epoch)
        self._changed.set()

    @property
    def watch(self) -> Any:
        return _Method(self._watch)

    @property
    def suspect(self) -> Any:
        return _Method(self._suspect)

    def _suspect(self, worker_id: str, _: int) -> None:
        self.suspects.append(worker_id)

    async def _watch(self, version: int, timeout_s: float) -> RosterView:
        changed, roster = self._changed, self._roster
        if self.fails is None and roster.version == version:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), timeout_s)
        if self.fails is not None:
            self.has_failed.set()
            raise self.fails
        changed.clear()
        return RosterView(roster.version, roster.members(), ())


class _Method:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.remote = function


class Watch:
    """A watch, and the workers that its views list."""

    def __init__(self, settle_s: float = NEVER_S) -> None:
        self.control = PlainControl()
        self.views: list[list[str]] = []
        self.members = [PlainWorker(name).member() for name in "abc"]
        self._watch = RosterWatch(self.control, self._take, settle_s)

    def _take(self, view: RosterView) -> None:
        self.views.append(sorted(member.worker_id for member in view.members))

    async def shows(self, names: str) -> None:
        await until(lambda: self.views[-1:] == [list(names)])

    def suspect(self, worker_id: str) -> None:
        self._watch.suspect(worker_id, 0)
        assert self.control.suspects[-1] == worker_id

    async def stop(self) -> None:
        await self._watch.stop()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())


def test_joins_and_departures_are_seen() -> None:
    async def body() -> None:
        watch = Watch()
        await watch.shows("")
        watch.control.join(*watch.members)
        await watch.shows("abc")
        watch.control.leave(watch.members[1])
        await watch.shows("ac")
        await watch.stop()

    run(body)


def test_workers_stay_in_use_while_they_join_a_new_control_replica() -> None:
    async def body() -> None:
        watch = Watch()
        watch.control.join(*watch.members)
        await watch.shows("abc")
        for error in (ActorDiedError(), RayServeException("the deployment is unavailable")):
            watch.views.clear()
            watch.control.lose(error)
            await watch.control.has_failed.wait()
            watch.control.replace()
            await until(lambda: len(watch.views) == 1)
            for number, member in enumerate(watch.members):
                watch.control.join(member)
                await until(lambda count=number + 2: len(watch.views) == count)
            assert watch.views == [["a", "b", "c"]] * 4
        await watch.stop()

    run(body)


def test_a_worker_that_did_not_answer_meanwhile_is_not_kept() -> None:
    async def body() -> None:
        watch = Watch()
        watch.control.join(*watch.members)
        await watch.shows("abc")
        watch.control.lose(ActorDiedError())
        await watch.control.has_failed.wait()
        watch.suspect("b")
        watch.control.replace()
        watch.control.join(watch.members[0])
        await watch.shows("ac")
        await watch.stop()

    run(body)


def test_a_worker_that_does_not_join_the_new_replica_is_dropped_in_the_end() -> None:
    async def body() -> None:
        watch = Watch(settle_s=0.2)
        watch.control.join(*watch.members)
        await watch.shows("abc")
        watch.control.lose(ActorDiedError())
        await watch.control.has_failed.wait()
        watch.control.replace()
        watch.control.join(watch.members[0])
        await watch.shows("a")
        watch.control.join(watch.members[2])
        await watch.shows("ac")
        watch.control.leave(watch.members[0])
        await watch.shows("c")
        await watch.stop()

    run(body)
