"""KV of a sequence's first tokens that arrives layer by layer while the sequence is computed already.

The step waits for a layer's KV just before it runs the layer, so that fetching the next layers is hidden behind
computing the first ones. Where copies into pages are queued on a device, the host does not wait for them: the device's
computing does, from the layer on that needs them.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from actors.engine.device_event import DeviceEvent


class LayerArrival:
    """One fetch. Whoever fetches calls `advance` and `fail`, from any thread; the engine's thread waits."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: how long a step waits for it, all layers together, before it gives up on it."""
        self.waited_s = 0.0
        """Time that the engine's thread has spent waiting."""
        self._left_s = timeout_s
        self._num_layers = 0
        self._has_failed = False
        self._queued: deque[tuple[int, DeviceEvent]] = deque()
        """Copies that computing does not wait for yet, each with how many layers were whole before it."""
        self._changed = threading.Condition()

    @property
    def has_failed(self) -> bool:
        """Whether some of it will not come, or not in time: what was computed with it is void."""
        with self._changed:
            return self._has_failed

    def advance(self, num_layers: int, copied: DeviceEvent | None = None) -> None:
        """The first `num_layers` layers are in their pages, or will be when the device comes to `copied`: the last of
        the copies that brought them."""
        with self._changed:
            if copied is not None:
                self._queued.append((self._num_layers, copied))
            self._num_layers = max(self._num_layers, num_layers)
            self._changed.notify_all()

    def fail(self) -> None:
        """Some of it will not come. No matter after the last layer."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()

    def wait(self, num_layers: int) -> None:
        """Returns when what the calling thread gives the device from now on will find the first `num_layers` layers in
        their pages, or it has failed."""
        with self._changed:
            if not self._is_over(num_layers):
                started_s = time.monotonic()
                arrived = self._changed.wait_for(lambda: self._is_over(num_layers), self._left_s)
                waited_s = time.monotonic() - started_s
                self.waited_s += waited_s
                self._left_s -= waited_s
                self._has_failed |= not arrived
            # A copy that came when these layers were whole already is of later ones.
            while self._queued and self._queued[0][0] < num_layers:
                self._queued.popleft()[1].wait()

    def _is_over(self, num_layers: int) -> bool:
        return self._num_layers >= num_layers or self._has_failed
