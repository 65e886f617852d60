"""What one fetch copies into pages, off the event loop. Nothing of it is on its way once the fetch has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from actors.engine.device_event import DeviceEvent
from actors.kv_pages import KvPages
from kv.part_range import PartRange


class PageWriter:
    """One fetch's, which writes one part after the other. Used from the event loop.

    Args:
        after: how far the device must have come before the blocks may be written: their sequence's `mark`.
    """

    def __init__(self, pages: KvPages, after: DeviceEvent | None) -> None:
        self._pages = pages
        self._after = after
        self._copied: DeviceEvent | None = None

    async def write(self, part: PartRange, block_ids: Sequence[int], payload: NDArray[Any]) -> DeviceEvent | None:
        """Copies a part. The pages are filled when the device comes to the event that is returned, and at the return
        where there is none. When cancelled it ends after the copy that was begun. Raises PagesUnavailableError."""

        def copy() -> None:
            self._copied = self._pages.write(part, block_ids, payload, self._after)

        await _to_the_end(copy)
        return self._copied

    async def finish(self) -> None:
        """Returns, or is cancelled, when all that was written is in its pages."""
        if self._copied is not None:
            await _to_the_end(self._copied.synchronize)
            self._copied = None


async def _to_the_end(function: Callable[[], object]) -> None:
    """Runs it in a thread. It is waited for however often the caller is cancelled: the pages are not free before."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    is_cancelled = False
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            is_cancelled = True
    running.result()
    if is_cancelled:
        raise asyncio.CancelledError
