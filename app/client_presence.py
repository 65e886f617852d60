"""What is done when a client goes away: its request is freed at once, whatever it was doing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

T = TypeVar("T")


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
