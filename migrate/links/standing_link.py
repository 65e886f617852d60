"""What every link does, whatever carries its bytes: a queue and two threads over a channel.

The sender takes messages from the queue, and says something every fifth of the timeout even if there is nothing to
send, so that silence always means a dead peer. The receiver always has a receive posted.

A link ends once, for one reason: `close`, a failing channel, a handler that raised, or the peer's goodbye. Then

- nothing more is accepted, and what is queued is dropped;
- the sender finishes the message it is at, and says goodbye with the reason if the channel still works;
- the receiver goes on receiving, for nobody, until the peer's goodbye, so that neither end is left in the middle of
  a send; what it cannot read any more it leaves at once;
- `on_dead` is called if it was not `close`, as soon as nothing that is still being sent can reach anybody;
- when both threads are done, the channel is given back. That takes no longer than the timeout, because a peer that
  does not answer falls silent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from migrate.links.interface import LinkCounters, LinkDeadError, LinkError, LinkHandlers, Message, check_message

_log = logging.getLogger(__name__)
_EXIT_WAIT_S = 2.0
_open_links: set[StandingLink] = set()
_open_links_lock = threading.Lock()


class ChannelBrokenError(LinkError):
    """What carries the link has ended: nothing that either end has not received yet ever will be."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The peer lives."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The last that comes from the peer."""

    reason: str


class Channel(Protocol):
    """What carries messages to one peer and back, in order.

    One thread sends and another receives. Every method but `release` raises ChannelBrokenError, with the reason, once
    the channel is broken: `receive` at once, those that send perhaps only after the timeout.
    """

    def transmit(self, message: Message) -> None:
        """Send `message`; returns when its tensors may be written again."""

    def heartbeat(self) -> None:
        """Tell the peer that this end lives."""

    def goodbye(self, reason: str) -> None:
        """Tell the peer that nothing more will come, and why."""

    def receive(self) -> Message | Heartbeat | Goodbye:
        """Wait for what comes next.

        Raises:
            LinkError: what has come makes no sense; nothing more can be received.
        """

    def release(self) -> None:
        """Give everything back; neither thread uses the channel any more."""


class StandingLink:
    """A `Link` over any channel. Owns the channel.

    Args:
        name: of the link, for threads and logs.
        heartbeat_s: longest time without saying anything; None where a peer cannot fall silent.
        max_message_bytes: largest payload that `send` takes.
    """

    def __init__(
        self, channel: Channel, handlers: LinkHandlers, name: str, heartbeat_s: float | None, max_message_bytes: int
    ) -> None:
        self._channel = channel
        self._handlers = handlers
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._max_message_bytes = max_message_bytes
        self._changed = threading.Condition()
        self._queue: deque[tuple[Message, Callable[[], None] | None]] = deque()
        self._end: str | None = None
        """Why the link has ended; None while it has not."""
        self._closed_here = False
        self._nothing_arrives = False
        """Whether the peer delivers no more of what is sent: it has said goodbye, or the channel is broken."""
        self._counters = LinkCounters()
        self._telling = threading.Lock()
        """Held while `on_sent` or `on_dead` is called, so that the latter is the last."""
        self._over = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name=f"{name} send", daemon=True)
        with _open_links_lock:
            _open_links.add(self)
        self._sender.start()
        threading.Thread(target=self._receive_all, name=f"{name} receive", daemon=True).start()

    @property
    def counters(self) -> LinkCounters:
        """See `Link`."""
        return self._counters

    def send(self, message: Message, on_sent: Callable[[], None] | None = None) -> None:
        """See `Link`."""
        check_message(message, self._max_message_bytes)
        with self._changed:
            if self._end is not None:
                raise LinkDeadError(self._end)
            self._queue.append((message, on_sent))
            self._changed.notify()

    def close(self) -> None:
        """See `Link`."""
        with self._changed:
            if self._end is None:
                self._closed_here = True
        self._ended("closed")

    def join(self, timeout_s: float) -> bool:
        """See `Link`."""
        return self._over.wait(timeout_s)

    def _ended(self, reason: str) -> None:
        """The first reason stays."""
        with self._changed:
            if self._end is None:
                self._end = reason
            self._queue.clear()
            self._changed.notify()

    def _count(self, **more: int) -> None:
        with self._changed:
            self._counters = replace(
                self._counters, **{name: getattr(self._counters, name) + value for name, value in more.items()}
            )

    def _send_all(self) -> None:
        self._until_the_end(self._send_next)
        with contextlib.suppress(LinkError):
            self._channel.goodbye(self._end or "")

    def _send_next(self) -> bool:
        """Send a message, or a heartbeat if for a while there was none; False when the link has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._end is not None, self._heartbeat_s)
            if self._end is not None:
                return False
            message, on_sent = self._queue.popleft() if self._queue else (None, None)
        if message is None:
            self._channel.heartbeat()
            self._count(heartbeats_sent=1)
            return True
        self._channel.transmit(message)
        self._count(messages_sent=1, bytes_sent=message.payload_bytes)
        with self._telling:
            if on_sent is not None and self._end is None:
                self._call("on_sent", on_sent)
        return True

    def _receive_all(self) -> None:
        self._until_the_end(self._receive_next)
        if not self._nothing_arrives:
            # The peer may yet receive what is being sent, and use it: until that is out, its tensors are the link's.
            self._sender.join()
        with self._telling:
            if not self._closed_here:
                self._call("on_dead", lambda: self._handlers.on_dead(self._end or ""))
        self._sender.join()
        self._channel.release()
        with _open_links_lock:
            _open_links.discard(self)
        self._over.set()

    def _receive_next(self) -> bool:
        """Receive something and pass it on; False after the peer's goodbye."""
        received = self._channel.receive()
        if isinstance(received, Goodbye):
            self._nothing_arrives = True
            self._ended(f"the peer has ended it: {received.reason}")
            return False
        if isinstance(received, Heartbeat):
            self._count(heartbeats_received=1)
        elif self._end is None:
            self._count(messages_received=1, bytes_received=received.payload_bytes)
            self._call("on_message", lambda: self._handlers.on_message(received))
        return True

    def _call(self, what: str, handler: Callable[[], None]) -> None:
        """Call a handler. One that raises must not leave the peer with a link that looks alive."""
        try:
            handler()
        except Exception as error:
            _log.exception("%s: %s raised", self._name, what)
            self._ended(f"{what} raised {type(error).__name__}: {error}")

    def _until_the_end(self, step: Callable[[], bool]) -> None:
        """Take steps until one says that there are no more, or fails."""
        try:
            while step():
                pass
        except LinkError as error:
            self._nothing_arrives |= isinstance(error, ChannelBrokenError)
            self._ended(str(error))
        except Exception as error:  # no memory, say: a thread that just went away would leave a link that looks alive
            _log.exception("%s failed", self._name)
            self._ended(f"{type(error).__name__}: {error}")


@atexit.register
def _close_open_links() -> None:
    """End what is open when the process does: a thread that waits inside torch while the interpreter goes down would
    have it aborted."""
    with _open_links_lock:
        links = list(_open_links)
    for link in links:
        link.close()
    until_s = time.monotonic() + _EXIT_WAIT_S
    for link in links:
        link.join(max(0.0, until_s - time.monotonic()))
