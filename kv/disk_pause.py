"""How long a node's disk is left alone after it refused something. Pure but for the clock."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("ray.serve")


class DiskPause:
    """Neither written to nor emptied while it `is_on`; then tried again.

    Args:
        length_s: of a pause.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._until_s = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the disk is to be left alone now."""
        return time.monotonic() < self._until_s

    def begin(self, why: str) -> None:
        """The disk refused something. Says so once a pause."""
        if not self.is_on:
            logger.warning("%s; nothing is written for %g s", why, self._length_s)
        self._until_s = time.monotonic() + self._length_s
