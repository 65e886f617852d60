"""What is done when a client goes away: its request is freed at once, whatever it was doing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect

T = TypeVar("T")

Message = MutableMapping[str, Any]


class Departures:
    """ASGI middleware: what Serve does when a client has left, in ASGI's words and without noise.

    It cancels the request, and with it the call by which the replica listens to the client. That call then fails
    rather than say that the client is gone.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        """See ASGI."""

        async def receive_or_gone() -> Message:
            try:
                return await receive()
            except TaskCancelledError:
                return {"type": "http.disconnect"}

        with contextlib.suppress(ClientDisconnect):  # nobody is left to be told
            await self._app(scope, receive_or_gone, send)


class EventStream(StreamingResponse):
    """A stream whose source is closed when the client goes away, at whatever point it was: before the first event too,
    when a generator that has not begun would close nothing."""

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        """`close` frees what `events` reads from; it is called once, after the last event or instead of it."""
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._close = close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, cancelled as soon as the client disconnects: nothing is sent while it runs, so nobody else
    would notice. The request's body must have been read. When this returns or raises, `work` has ended."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
