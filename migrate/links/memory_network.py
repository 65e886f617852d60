"""Workers of one process that find each other in memory: what `GlooConnector` is, for tests."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from migrate.links.interface import LinkError, LinkHandlers, LinkSettings
from migrate.links.memory_link import MemoryFaults, MemoryLink, memory_pair

_Meeting = tuple[frozenset[str], int]


@dataclass(slots=True)
class _Waiting:
    worker: str
    handlers: LinkHandlers
    link: Future[MemoryLink] = field(default_factory=Future)


class MemoryNetwork:
    """Joins the ends of links that are asked for with the same two workers and epoch."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._waiting: dict[_Meeting, _Waiting] = {}
        self._faults: dict[tuple[str, str], MemoryFaults] = {}

    def faults(self, worker: str, peer: str) -> MemoryFaults:
        """Of what `worker` sends to `peer`, in every epoch."""
        with self._lock:
            return self._faults.setdefault((worker, peer), MemoryFaults())

    def connector(self, worker: str) -> MemoryConnector:
        """Makes the links of `worker`."""
        return MemoryConnector(self, worker)

    def meet(self, worker: str, peer: str, epoch: int, handlers: LinkHandlers) -> MemoryLink:
        """The end of `worker`, once `peer` has asked for the other one.

        Raises:
            LinkError: it has not within the time for connecting.
        """
        faults = self.faults(worker, peer), self.faults(peer, worker)
        meeting = frozenset({worker, peer}), epoch
        with self._lock:
            other = self._waiting.pop(meeting, None)
            if other is None or other.worker == worker:
                own = self._waiting[meeting] = _Waiting(worker, handlers)
                other = None
        if other is not None:
            link, others = memory_pair((handlers, other.handlers), self._settings, faults, f"{worker}-{peer}/{epoch}")
            other.link.set_result(others)
            return link
        try:
            return own.link.result(self._settings.connect_timeout_s)
        except TimeoutError:
            with self._lock:
                if self._waiting.get(meeting) is own:
                    del self._waiting[meeting]
                    raise LinkError(f"{peer!r} did not connect to {worker!r} in epoch {epoch}") from None
            return own.link.result()  # the other end has come in the last moment


@dataclass(frozen=True, slots=True)
class MemoryConnector:
    """See `Connector`."""

    network: MemoryNetwork
    worker: str

    def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> MemoryLink:
        """See `Connector`."""
        return self.network.meet(self.worker, peer, epoch, handlers)
