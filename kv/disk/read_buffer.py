"""The memory that parts are read into on their way from a file to the object store."""

from __future__ import annotations

import mmap
import threading

import numpy as np
from numpy.typing import NDArray


class ReadBuffer(threading.local):
    """One for each thread that uses it, as large as the largest part that the thread has read. It is kept: new pages
    for every part would take about as long as reading them."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Memory of this thread, which begins with a page. What an earlier call gave has the same bytes.

        Raises:
            OSError: there is no memory for it.
        """
        if num_bytes > len(self._memory):
            self._memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return self._memory[:num_bytes]
