"""The file of API keys while the server runs: a change of it holds within a second or so, without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

from app.api_keys import ApiKeys, ApiKeysError

CHECK_PERIOD_S = 1.0
"""A request that comes later than that after the last look at the file looks at it again."""

logger = logging.getLogger("ray.serve")


class KeyFile:
    """The keys that are let in now. A file that cannot be read or used leaves those that were there before: a mistake
    in it locks nobody out. It is tried again at every look. Whoever is to be locked out at once loses their line in a
    file that is right.

    Raises (at construction): ApiKeysError, OSError.
    """

    def __init__(self, path: str | Path, check_period_s: float = CHECK_PERIOD_S) -> None:
        self._path = Path(path)
        self._check_period_s = check_period_s
        self._seen = _version(self._path)
        self._keys = ApiKeys.load(self._path)
        self._failure: str | None = None
        self._looking = threading.Lock()
        self._checked_s = time.monotonic()

    async def current(self) -> ApiKeys:
        """The keys of the file as it was at most `check_period_s` ago. The first who finds them older waits while a
        thread looks at the file; until it has, others get those that were there before."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= self._check_period_s:
            self._checked_s = now_s
            await asyncio.to_thread(self._look)
        return self._keys

    def _look(self) -> None:
        if not self._looking.acquire(blocking=False):
            return  # a file system that does not answer is to hold one thread, not all
        try:
            self._read_if_changed()
        finally:
            self._looking.release()

    def _read_if_changed(self) -> None:
        try:
            version = _version(self._path)
            if version == self._seen:
                return
            self._keys = ApiKeys.load(self._path)
        except (ApiKeysError, OSError) as error:
            if str(error) != self._failure:  # at every look would be once a second
                logger.error("the API keys stay as they were: %s", error)
            self._failure = str(error)
            return
        self._seen, self._failure = version, None
        logger.info("API keys were read again from %s", self._path)


def _version(path: Path) -> tuple[int, ...]:
    """Changes whenever a file is written or replaced, or given other rights, even where the time of its content is set
    back, as `cp -p` does. Raises OSError."""
    stat = os.stat(path)
    return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size
