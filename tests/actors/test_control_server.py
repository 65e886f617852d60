"""What workers and ingresses are told by the control deployment, without Serve and without a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from actors.addresses import WorkerAddress
from actors.control import ControlServer
from actors.messages import WorkerFacts
from kv.layout import KvLayout
from migrate.roster import Member, RosterError

FACTS = WorkerFacts(KvLayout(4, 4, 8, 16, "float32"), b"f" * 16, 100, 100, 500, (2,), "torch", "cpu")


class LivingActor:
    """The one method that the roster calls; it does not end by itself."""

    class wait_closed:  # as a handle has it
        @staticmethod
        def remote() -> asyncio.Future[None]:
            return asyncio.get_running_loop().create_future()


class Control(ControlServer.func_or_class):  # type: ignore[misc, name-defined]
    def __del__(self) -> None:
        """Serve awaits what this gives when it stops a replica; here nobody would."""


def member(worker_id: str, epoch: int = 0) -> Member:
    return Member(
        worker_id, epoch, "monolithic", "node", b"f" * 16, 16, 100, 100, WorkerAddress(LivingActor(), FACTS)
    )  # fmt: skip


def run(body: Callable[[Any], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body(Control(None))

    asyncio.run(limited())


def test_a_worker_that_is_known_need_not_join_again() -> None:
    async def body(control: Any) -> None:
        assert not await control.is_well("w", 0, 0)  # as to the successor of a control replica that was lost
        await control.join(member("w"))
        assert await control.is_well("w", 0, 0)
        assert not await control.is_well("w", 1, 0)
        assert not await control.is_well("w", 0, 1)  # it was told of other stores than there are

    run(body)


def test_a_suspected_worker_that_is_well_is_listed_again_and_watchers_are_told() -> None:
    async def body(control: Any) -> None:
        await control.join(member("w"))
        await control.suspect("w", 0)
        view = await control.watch(-1, 0.0)
        assert view.members == ()
        watching = asyncio.create_task(control.watch(view.version, 1000.0))
        await asyncio.sleep(0)
        assert await control.is_well("w", 0, 0)
        assert [listed.worker_id for listed in (await watching).members] == ["w"]

    run(body)


def test_a_worker_that_was_taken_for_dead_is_neither_well_nor_let_in_again() -> None:
    async def body(control: Any) -> None:
        await control.join(member("w"))
        await control.leave("w", 0)
        assert not await control.is_well("w", 0, 0)
        with pytest.raises(RosterError):
            await control.join(member("w"))
        assert (await control.watch(-1, 0.0)).members == ()

    run(body)
