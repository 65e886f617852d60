"""When a request may be computed though the last layers of its prefix are still being fetched."""

from __future__ import annotations

from collections.abc import Callable

from actors.engine.device_event import DeviceEvent
from actors.engine.layer_arrival import LayerArrival
from kv.fetch_choice import may_compute_meanwhile


class EarlyStart:
    """One request's fetch, as whoever fetches tells of it.

    Args:
        num_layers: of the model.
        compute_s: what computing the request takes once its prefix is there.
        timeout_s: how long a step waits for layers at most.
        begin: called once, if at all: computing may begin, with so many tokens taken for fetched.
    """

    def __init__(
        self, num_layers: int, compute_s: float, timeout_s: float, begin: Callable[[int, LayerArrival], None]
    ) -> None:
        self._num_layers = num_layers
        self._compute_s = compute_s
        self._begin = begin
        self._incoming = LayerArrival(timeout_s)
        self._is_decided = False

    def arrived(self, num_layers: int, elapsed_s: float, num_tokens: int, copied: DeviceEvent | None = None) -> None:
        """The first `num_layers` layers of the first `num_tokens` tokens are in their pages, `elapsed_s` after the
        fetch began; or they will be when the device comes to `copied`."""
        self._incoming.advance(num_layers, copied)
        if self._is_decided or not 0 < num_layers < self._num_layers:
            return
        if may_compute_meanwhile(elapsed_s, num_layers, self._num_layers, self._compute_s):
            self._is_decided = True
            self._begin(num_tokens, self._incoming)

    def fail(self) -> None:
        """Fewer tokens will be there than was said, or none. Computing that has begun is void."""
        self._is_decided = True
        self._incoming.fail()
