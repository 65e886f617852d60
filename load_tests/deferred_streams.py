"""A stand-in for a device's streams on a CPU, as unhelpful as a device may be, and stricter.

What a side stream is given is not done before somebody waits for it; work of other streams runs before, between or
after, by chance, as far as events allow. So whoever forgets to wait finds old numbers or spoils new ones. And what may
go wrong on a device is refused here: a copy that holds up the host, ordinary host memory in a stream, memory that is
taken within a stream, memory of another stream that was not kept. It is for checking order, not for speed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from actors.engine.device_event import DeviceEvent
from actors.engine.device_streams import SideStream


class DeferredStreams:
    """An `actors.engine.device_streams.Streams`.

    Args:
        chance: draws what runs when. Equal seeds and equal calls in one thread give equal orders.
    """

    def __init__(self, chance: random.Random) -> None:
        self.compute = DeferredStream(self)
        """The default stream. Work that is not queued in it by `compute.use` is done at once."""
        self._chance = chance
        self._lock = threading.RLock()
        self._present = threading.local()
        self._streams = [self.compute]
        self._pinned: set[int] = set()

    def side_stream(self) -> SideStream:
        """See Streams."""
        self._streams.append(DeferredStream(self))
        return self._streams[-1]

    def record(self) -> DeviceEvent:
        """See Streams."""
        with self._lock:
            return DeferredEvent(self, self.present())

    def pinned_bytes(self, num_bytes: int) -> torch.Tensor:
        """See Streams."""
        memory = torch.full((num_bytes,), 0xA5, dtype=torch.uint8)
        self._pinned.add(_storage(memory))
        return memory

    def present(self) -> DeferredStream:
        """The calling thread's."""
        stream: DeferredStream = getattr(self._present, "stream", self.compute)
        return stream

    def run_some(self) -> None:
        """The device gets on, or not."""
        with self._lock:
            while self._chance.random() < 0.5:
                ready = [stream for stream in self._streams if stream.may_go_on()]
                if not ready:
                    return
                self._chance.choice(ready).run_next()

    @contextmanager
    def using(self, stream: DeferredStream) -> Iterator[None]:
        """The stream is the calling thread's present one, and what it does is queued."""
        before = self.present()
        self._present.stream = stream
        try:
            with _Deferring(self, stream):
                yield
        finally:
            self._present.stream = before
            self.run_some()

    def queue(self, stream: DeferredStream, work: Callable[[], object]) -> None:
        """Behind all that the stream was given."""
        with self._lock:
            stream.append(work)
        self.run_some()

    def run_until(self, event: DeferredEvent) -> None:
        """All that its stream was given before the event."""
        with self._lock:
            while not event.is_reached():
                event.stream.run_next()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in `pinned_bytes`."""
        return _storage(tensor) in self._pinned


class DeferredEvent:
    """A `DeviceEvent`."""

    def __init__(self, streams: DeferredStreams, stream: DeferredStream) -> None:
        self.stream = stream
        self._streams = streams
        self._position = stream.num_given

    def is_reached(self) -> bool:
        """Whether the stream has come so far."""
        return self.stream.num_done >= self._position

    def wait(self) -> None:
        """See DeviceEvent."""
        present = self._streams.present()
        if present is self.stream:
            return
        if present is self._streams.compute and not present.num_given:
            self._streams.run_until(self)  # what computes next is done at once
        else:
            self._streams.queue(present, _Wait(self._streams, self))

    def synchronize(self) -> None:
        """See DeviceEvent."""
        self._streams.run_until(self)
        self._streams.run_some()


class DeferredStream:
    """A `SideStream`."""

    def __init__(self, streams: DeferredStreams) -> None:
        self.num_given = 0
        self.num_done = 0
        self._streams = streams
        self._work: deque[Callable[[], object]] = deque()
        self._memory: set[int] = set()

    def use(self) -> Any:
        """See SideStream."""
        return self._streams.using(self)

    def device_bytes(self, num_bytes: int) -> torch.Tensor:
        """See SideStream."""
        memory = torch.full((num_bytes,), 0x5A, dtype=torch.uint8)
        self.keep(memory)
        return memory

    def keep(self, tensor: torch.Tensor) -> None:
        """See SideStream."""
        self._memory.add(_storage(tensor))

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is this stream's or kept for it."""
        return _storage(tensor) in self._memory

    def append(self, work: Callable[[], object]) -> None:
        """Not to be done yet."""
        self._work.append(work)
        self.num_given += 1

    def may_go_on(self) -> bool:
        """Whether there is something to do that need not wait for another stream."""
        first = self._work[0] if self._work else None
        return first is not None and (not isinstance(first, _Wait) or first.event.is_reached())

    def run_next(self) -> None:
        """The oldest that is not done, and what it waits for."""
        work = self._work.popleft()
        with _disable_current_modes():  # whoever waits may be queueing in another stream
            work()
        self.num_done += 1


class _Wait:
    def __init__(self, streams: DeferredStreams, event: DeferredEvent) -> None:
        self.event = event
        self._streams = streams

    def __call__(self) -> None:
        self._streams.run_until(self.event)


class _Deferring(TorchDispatchMode):
    """Queues the operators that write, with what they were given; views are made at once."""

    def __init__(self, streams: DeferredStreams, stream: DeferredStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._streams = streams
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if not func._schema.is_mutable:
            result = func(*args, **options)
            inputs = {_storage(leaf) for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)}
            if any(_storage(leaf) not in inputs for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                raise RuntimeError(f"operator {func} takes memory within a stream")
            return result
        self._check(func, args, options)
        self._streams.queue(self._stream, lambda: func(*args, **options))
        return options["out"] if "out" in options else args[0]

    def _check(self, func: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, torch.Tensor)]
        pinned = [self._streams.is_pinned(tensor) for tensor in tensors]
        for tensor, is_pinned in zip(tensors, pinned, strict=True):
            if not is_pinned and not self._stream.keeps(tensor):
                raise RuntimeError(f"operator {func} uses memory that is neither pinned nor kept for its stream")
        if func._schema.name == "aten::copy_":
            is_async = options.get("non_blocking", args[2] if len(args) > 2 else False)
            if any(pinned) and not is_async:
                raise RuntimeError("a copy from or to the host waits for the device: give non_blocking")
        elif any(pinned):
            raise RuntimeError(f"operator {func} was given memory of the host")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
