"""A place in the work that a device was given and may not have come to yet. No torch: schedulers pass it on."""

from __future__ import annotations

from typing import Protocol


class DeviceEvent(Protocol):
    """A point in one stream of a device; the methods have the names of `torch.cuda.Event`, which is one. Recorded once
    and never again, so that any number of threads may wait for it."""

    def wait(self) -> None:
        """What the calling thread gives its present stream from now on begins after this point. Does not wait."""

    def synchronize(self) -> None:
        """Returns when the device has come to this point. RuntimeError when it broke before."""
