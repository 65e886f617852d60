"""Keeps an ingress's view of the workers and of the store up to date, by one long call to the control deployment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError

from actors.addresses import RosterView

WATCH_TIMEOUT_S = 20.0
"""How long one call stays open while nothing changes."""
_RETRY_S = 0.5

logger = logging.getLogger("ray.serve")


class RosterWatch:
    """Calls `on_change(view)` for every version of the roster it sees, beginning with the first."""

    def __init__(self, control: Any, on_change: Callable[[RosterView], None]) -> None:
        """`control`: Serve handle of the control deployment."""
        self._control = control
        self._on_change = on_change
        self._task = asyncio.create_task(self._watch())

    def suspect(self, worker_id: str, epoch: int) -> None:
        """Tells the control deployment that a worker did not answer. Does not wait."""
        self._control.suspect.remote(worker_id, epoch)

    async def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        version = -1
        while True:
            try:
                view: RosterView = await self._control.watch.remote(version, WATCH_TIMEOUT_S)
            except RayError as error:
                # The control replica restarts; what is known stays in use, and its successor counts anew.
                logger.warning("the roster cannot be read (%s); trying again", type(error).__name__)
                version = -1
                await asyncio.sleep(_RETRY_S)
                continue
            if view.version != version:
                version = view.version
                self._on_change(view)
