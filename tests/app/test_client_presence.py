from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest
from fastapi import Request
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect

from app.client_presence import Departures, EventStream, unless_gone

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "asgi": {"spec_version": "2.4"}}


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())


class Work:
    """Something that a client waits for."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.is_tidied = False

    async def run(self) -> str:
        self.begun.set()
        try:
            await self.may_end.wait()
            return "done"
        finally:
            await asyncio.sleep(0)  # freeing takes a turn of the loop
            self.is_tidied = True


class Client:
    """The far end of a connection."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.request = Request(SCOPE, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_a_client_that_stays_gets_the_result() -> None:
    async def body() -> None:
        client, work = Client(), Work()
        work.may_end.set()
        assert await unless_gone(client.request, work.run()) == "done"

    run(body)


def test_what_the_work_raises_is_raised() -> None:
    async def body() -> None:
        async def fail() -> None:
            raise LookupError("nothing there")

        with pytest.raises(LookupError):
            await unless_gone(Client().request, fail())

    run(body)


@pytest.mark.parametrize("by_client", [True, False], ids=["client leaves", "server cancels"])
def test_work_that_nobody_waits_for_has_ended_when_the_wait_ends(by_client: bool) -> None:
    async def body() -> None:
        client, work = Client(), Work()
        waiting = asyncio.create_task(unless_gone(client.request, work.run()))
        await work.begun.wait()
        if by_client:
            client.left.set()
        else:
            waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        assert work.is_tidied

    run(body)


@pytest.mark.parametrize("events_before", [0, 1, 3])
def test_a_stream_closes_its_source_wherever_it_is_cut(events_before: int) -> None:
    """Before the first event the generator has not begun, and closing it runs nothing of it."""

    async def body() -> None:
        closed: list[str] = []

        async def events() -> AsyncGenerator[bytes]:
            try:
                while True:
                    yield b"event"
            finally:
                closed.append("events")

        async def close() -> None:
            closed.append("source")

        sent: list[str] = []

        async def send(message: dict[str, Any]) -> None:
            if len(sent) == events_before:
                raise OSError("the client is gone")
            sent.append(message["type"])

        with pytest.raises(ClientDisconnect):
            await EventStream(events(), close)(SCOPE, Client()._receive, send)
        assert closed == (["events", "source"] if events_before else ["source"])

    run(body)


def test_a_whole_stream_is_sent_and_its_source_closed_once() -> None:
    async def body() -> None:
        closed: list[str] = []

        async def events() -> AsyncGenerator[bytes]:
            yield b"one"
            yield b"two"

        async def close() -> None:
            closed.append("source")

        sent: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("body", b""))

        await EventStream(events(), close)(SCOPE, Client()._receive, send)
        assert b"".join(sent) == b"onetwo"
        assert closed == ["source"]

    run(body)


def test_a_call_that_serve_cancelled_is_a_client_that_left() -> None:
    async def body() -> None:
        seen: list[str] = []

        async def app(_: Any, receive: Callable[[], Awaitable[Any]], __: Any) -> None:
            seen.append((await receive())["type"])
            raise ClientDisconnect

        async def receive() -> dict[str, Any]:
            raise TaskCancelledError

        async def send(_: dict[str, Any]) -> None:
            raise AssertionError("there is nobody to send to")

        await Departures(app)(SCOPE, receive, send)
        assert seen == ["http.disconnect"]

    run(body)
