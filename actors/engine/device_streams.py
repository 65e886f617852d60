"""Streams, events and pinned memory: what staged copies need of a device, and CUDA's way of it.

A stream is a queue of work; one device works on several at a time, and nothing but events orders two of them. Every
thread has a present stream, which is the device's default stream unless the thread is inside `SideStream.use`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from actors.engine.device_event import DeviceEvent


class SideStream(Protocol):
    """A stream of its own. Not ordered with the default stream, unlike a stream that CUDA makes by default."""

    def use(self) -> AbstractContextManager[Any]:
        """Within it this stream is the calling thread's present one."""

    def device_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of the device's memory that is this stream's: once freed, it may be given out again to
        whoever uses this stream, which is in order."""

    def keep(self, tensor: torch.Tensor) -> None:
        """This stream uses memory that was taken on another one: once freed, it is given to nobody before this stream
        has done what it was given until then."""


class Streams(Protocol):
    """One device's."""

    def side_stream(self) -> SideStream:
        """A new one."""

    def record(self) -> DeviceEvent:
        """A new event behind all that the calling thread's present stream was given so far."""

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of host memory that the device copies to and from while the host goes on."""


class CudaStreams:
    """Of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def side_stream(self) -> SideStream:
        """See Streams."""
        return _CudaSideStream(torch.cuda.Stream(self._device))

    def record(self) -> DeviceEvent:
        """See Streams. Whoever waits for the event sleeps meanwhile: by default CUDA keeps a core busy with waiting."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        """See Streams."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class _CudaSideStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def use(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def device_bytes(self, num_bytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._stream.device)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)
