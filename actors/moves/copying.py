"""Copies of a move, some of them on their way at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from actors.engine.module_transfer import PageChunk

COPIES_AT_A_TIME = 3
"""Chunks on their way at a time: one that is read, one on the link, one that is written."""


async def some_at_a_time(copy: Callable[[PageChunk], Awaitable[None]], chunks: Sequence[PageChunk]) -> None:
    """Copies all, some at a time, begun in their order. When one fails, or this is cancelled, the others are given up.
    One that has begun may end later; it leaves alone what was given to others meanwhile."""
    running = deque[asyncio.Future[None]]()
    try:
        for chunk in chunks:
            if len(running) == COPIES_AT_A_TIME:
                await running.popleft()
            running.append(asyncio.ensure_future(copy(chunk)))
        while running:
            await running.popleft()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
