"""Gloo links of a worker that is told with each one where to meet its peer: a rendezvous may be replaced."""

from __future__ import annotations

from migrate.links.gloo_link import GlooConnector
from migrate.links.interface import Link, LinkError, LinkHandlers, LinkSettings
from migrate.links.rendezvous import RendezvousAddress


class LateConnector:
    """A `Connector`; see `GlooConnector` for the arguments. `rendezvous` is set before the first `connect`."""

    def __init__(self, worker: str, host: str, settings: LinkSettings) -> None:
        self.rendezvous: RendezvousAddress | None = None
        self._worker = worker
        self._host = host
        self._settings = settings

    def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> Link:
        """See `Connector`."""
        if self.rendezvous is None:
            raise LinkError(f"{self._worker!r} knows no rendezvous at which to meet {peer!r}")
        return GlooConnector(self._worker, self._host, self.rendezvous, self._settings).connect(peer, epoch, handlers)
