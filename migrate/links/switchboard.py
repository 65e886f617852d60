"""The links of one worker, by peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from migrate.links.interface import Link, LinkDeadError, LinkError, LinkHandlers, Message


class Connector(Protocol):
    """Makes links for one worker."""

    def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> Link:
        """Wait until `peer` does the same, and return this end.

        Raises:
            LinkError: with what was tried and what to do.
        """


@dataclass(slots=True)
class _Peer:
    """The newest epoch of one peer."""

    epoch: int
    link: Link | None = None
    end: str | None = None
    """Why there is no link, or none that lives."""
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when the attempt to make a link is over."""


class Switchboard:
    """Finds, makes and replaces a worker's links. Safe to use from any thread; nothing in it waits but `close`.

    A peer has one link at most, of the newest epoch that was asked for; messages of an earlier one are dropped. Whoever
    coordinates two workers gives both the same epoch, a higher one each time.

    Args:
        worker: id of this worker.
        connector: makes its links.
        on_message: called with the peer's id and each message; see `LinkHandlers`.
        on_dead: called with the peer's id, epoch and reason when a link dies.
    """

    def __init__(
        self,
        worker: str,
        connector: Connector,
        on_message: Callable[[str, Message], None],
        on_dead: Callable[[str, int, str], None],
    ) -> None:
        self._worker = worker
        self._connector = connector
        self._on_message = on_message
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = False

    def connect(self, peer: str, epoch: int) -> Future[Link]:
        """Make a link to `peer`, on a thread of its own; the one of an earlier epoch is closed now.

        The future ends in a LinkError if the other end could not be reached in time, or if meanwhile a higher epoch was
        asked for, the peer forgotten or the switchboard closed. Cancelling it changes nothing.

        Raises:
            LinkError: an epoch that is not higher than the last one, or a switchboard that is closed.
            ValueError: a peer that is this worker, or an epoch below 0.
        """
        if peer == self._worker or epoch < 0:
            raise ValueError(
                f"worker {self._worker!r} was to be linked to {peer!r} in epoch {epoch}; allowed are another worker "
                "and an epoch of 0 or more"
            )
        entry = _Peer(epoch)
        with self._lock:
            if self._closed:
                raise LinkError(f"the links of {self._worker!r} are closed; it makes no new ones")
            old = self._peers.get(peer)
            if old is not None and old.epoch >= epoch:
                raise LinkError(
                    f"{self._worker!r} was to be linked to {peer!r} in epoch {epoch}, and has tried epoch {old.epoch}: "
                    "give both ends a higher one"
                )
            self._peers[peer] = entry
        if old is not None and old.link is not None:
            old.link.close()
        future: Future[Link] = Future()
        future.set_running_or_notify_cancel()
        # No daemon: a thread that is inside torch when the interpreter goes down would have it aborted.
        threading.Thread(target=self._make, args=(peer, entry, future), name=f"connect to {peer}").start()
        return future

    def link(self, peer: str) -> Link:
        """The link to `peer`.

        Raises:
            LinkDeadError: it has ended, and why.
            LinkError: there is none, or not yet.
        """
        with self._lock:
            entry = self._peers.get(peer)
            if entry is None:
                raise LinkError(f"{self._worker!r} has no link to {peer!r}: connect first")
            if entry.end is not None:
                raise LinkDeadError(f"the link to {peer!r} of epoch {entry.epoch} is dead: {entry.end}")
            if entry.link is None:
                raise LinkError(f"the link to {peer!r} of epoch {entry.epoch} is still being made")
            return entry.link

    def peers(self) -> dict[str, int]:
        """Peers with a link that lives, and the epoch of each."""
        with self._lock:
            return {
                peer: entry.epoch for peer, entry in self._peers.items() if entry.link is not None and entry.end is None
            }

    def forget(self, peer: str) -> None:
        """Close the link to `peer`, if there is one, and keep nothing of it, not even its last epoch: for a worker that
        will not come back under this id."""
        with self._lock:
            entry = self._peers.pop(peer, None)
        if entry is not None and entry.link is not None:
            entry.link.close()

    def close(self, wait_s: float = 0.0) -> bool:
        """Close all links and make no more; waits so long for their threads. Whether all have ended."""
        with self._lock:
            self._closed = True
            links = [entry.link for entry in self._peers.values() if entry.link is not None]
            self._peers.clear()
        for link in links:
            link.close()
        until_s = time.monotonic() + wait_s
        return all(link.join(max(0.0, until_s - time.monotonic())) for link in links)

    def _make(self, peer: str, entry: _Peer, future: Future[Link]) -> None:
        handlers = LinkHandlers(
            lambda message: self._arrived(peer, entry, message), lambda reason: self._died(peer, entry, reason)
        )
        try:
            link = self._connector.connect(peer, entry.epoch, handlers)
        except Exception as error:
            with self._lock:
                entry.end = str(error)
            future.set_exception(error)
            return
        with self._lock:
            wanted = self._peers.get(peer) is entry
            if wanted:
                entry.link = link
        entry.settled.set()
        if wanted:
            future.set_result(link)
        else:
            link.close()
            future.set_exception(LinkError(f"the link to {peer!r} of epoch {entry.epoch} is no longer wanted"))

    def _arrived(self, peer: str, entry: _Peer, message: Message) -> None:
        entry.settled.wait()  # so that `link` has the link for an answer to its first message
        with self._lock:
            stale = self._peers.get(peer) is not entry
        if not stale:
            self._on_message(peer, message)

    def _died(self, peer: str, entry: _Peer, reason: str) -> None:
        with self._lock:
            entry.end = reason
            # Kept for its epoch, without the link: its queue and counters are of no more use.
            entry.link = None
        self._on_dead(peer, entry.epoch, reason)
