"""An extent on its way from a file to the object store, part after part."""

from __future__ import annotations

import asyncio
from typing import Any


class ExtentRead:
    """References to an extent's parts, each as soon as it is there: who wants the first layers does not wait for the
    last ones. Used from one event loop."""

    def __init__(self, num_parts: int) -> None:
        self._parts: list[asyncio.Future[Any | None]] = [
            asyncio.get_running_loop().create_future() for _ in range(num_parts)
        ]
        self._num_read = 0

    async def part(self, index: int) -> Any | None:
        """The reference of a part, as soon as it has been read; None when it cannot be had. Not verified."""
        # Shielded: a reader that gives up must not end the read of another.
        return await asyncio.shield(self._parts[index]) if 0 <= index < len(self._parts) else None

    def has_read(self, ref: Any) -> None:
        """The next part is there."""
        self._parts[self._num_read].set_result(ref)
        self._num_read += 1

    def end(self) -> None:
        """No more parts come. What has not been read cannot be had."""
        for waiting in self._parts[self._num_read :]:
            waiting.set_result(None)
        self._num_read = len(self._parts)
