"""Keeps an ingress's view of the workers and of the store up to date, by one long call to the control deployment.

When the control replica is lost its successor knows nobody, and workers join it again one by one. For that time nobody
is believed to have left who was there before: the workers are well, and one that is not is noticed by its line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from actors.addresses import RosterView

WATCH_TIMEOUT_S = 20.0
SETTLE_S = 15.0
"""From the first word of a new control replica until all workers have joined it: several of their health checks."""
_RETRY_S = 0.5

logger = logging.getLogger("ray.serve")


class RosterWatch:
    """Calls `on_change(view)` for every version of the roster it sees, beginning with the first."""

    def __init__(self, control: Any, on_change: Callable[[RosterView], None], settle_s: float = SETTLE_S) -> None:
        """`control`: Serve handle of the control deployment."""
        self._control = control
        self._on_change = on_change
        self._settle_s = settle_s
        self._seen: RosterView | None = None
        self._task = asyncio.create_task(self._watch())

    def suspect(self, worker_id: str, epoch: int) -> None:
        """Tells the control deployment that a worker did not answer. Does not wait."""
        if self._seen is not None:
            members = tuple(member for member in self._seen.members if member.worker_id != worker_id)
            self._seen = replace(self._seen, members=members)
        self._control.suspect.remote(worker_id, epoch)

    async def stop(self) -> None:
        """Ends the watch."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        version, settled_s = -1, 0.0
        while True:
            timeout_s = min(WATCH_TIMEOUT_S, settled_s - clock()) if settled_s else WATCH_TIMEOUT_S
            try:
                view: RosterView = await self._control.watch.remote(version, max(timeout_s, 0.0))
            except (RayError, RayServeException) as error:
                # The control replica restarts; what is known stays in use, and its successor counts anew.
                logger.warning("the roster cannot be read (%s); trying again", type(error).__name__)
                version = -1
                await asyncio.sleep(_RETRY_S)
                continue
            if version == -1 and self._seen is not None:
                settled_s = clock() + self._settle_s
            has_settled = bool(settled_s) and clock() >= settled_s
            if view.version == version and not has_settled:
                continue
            version = view.version
            if has_settled:
                settled_s = 0.0
            elif settled_s and self._seen is not None:
                view = _with_missing(view, self._seen)
            self._seen = view
            self._on_change(view)


def _with_missing(view: RosterView, before: RosterView) -> RosterView:
    """The view with the members that only the one before has."""
    listed = {member.worker_id for member in view.members}
    return replace(view, members=(*view.members, *(m for m in before.members if m.worker_id not in listed)))
