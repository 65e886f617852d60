"""A link between two threads of one process, for tests of whatever is built over links.

It keeps the promises of every link: messages arrive in other memory than they were sent from, on threads of the link,
after any delay. And it fails when told to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from migrate.links.interface import LinkDeadError, LinkHandlers, LinkSettings, Message
from migrate.links.standing_link import ChannelBrokenError, Goodbye, Heartbeat, StandingLink


class MemoryFaults:
    """What goes wrong with what one end of a link sends. May be changed at any time, from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._left: int | None = None
        self._refusal: str | None = None

    def hold(self) -> None:
        """Let no message out until `release`. A link that is closed meanwhile ends after it."""
        with self._changed:
            self._held = True

    def release(self) -> None:
        """Let out what was held, and what comes."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def die_after(self, messages: int) -> None:
        """Break the link, both ways and without a goodbye, instead of sending another message after so many."""
        with self._changed:
            self._left = messages

    def refuse_sends(self, reason: str) -> None:
        """Have `send` say that the link is dead, as it does when a peer has died and `on_dead` is not there yet."""
        with self._changed:
            self._refusal = reason

    def check_send(self) -> None:
        """Called with each `send`.

        Raises:
            LinkDeadError: sends are refused.
        """
        with self._changed:
            if self._refusal is not None:
                raise LinkDeadError(self._refusal)

    def let_out(self) -> bool:
        """Called before each message goes out; waits while they are held. False if the link is to break instead."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held)
            if self._left is None:
                return True
            self._left -= 1
            return self._left >= 0


class _Direction:
    """What is on its way from one end to the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._items: deque[Message | Goodbye] = deque()
        self._broken: str | None = None

    def put(self, item: Message | Goodbye) -> None:
        with self._changed:
            if self._broken is not None:
                raise ChannelBrokenError(self._broken)
            self._items.append(item)
            self._changed.notify()

    def get(self) -> Message | Goodbye:
        """What was sent before the link broke still arrives."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._broken is not None)
            if not self._items:
                raise ChannelBrokenError(self._broken or "")
            return self._items.popleft()

    def break_off(self, reason: str) -> None:
        with self._changed:
            self._broken = self._broken or reason
            self._changed.notify_all()


class MemoryChannel:
    """One end; see `Channel`. A peer in the same process never falls silent, so there are no heartbeats."""

    def __init__(self, outgoing: _Direction, incoming: _Direction, faults: MemoryFaults) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._faults = faults

    def transmit(self, message: Message) -> None:
        """See `Channel`."""
        if not self._faults.let_out():
            self._break_off("the link broke, as it was told to")
        tensors = tuple(tensor.detach().clone() for tensor in message.tensors)
        self._outgoing.put(Message(message.kind, message.work_id, message.version, message.meta, tensors))

    def heartbeat(self) -> None:
        """See `Channel`."""

    def goodbye(self, reason: str) -> None:
        """See `Channel`."""
        self._outgoing.put(Goodbye(reason))

    def receive(self) -> Message | Heartbeat | Goodbye:
        """See `Channel`."""
        return self._incoming.get()

    def release(self) -> None:
        """See `Channel`."""
        self._break_off("the other end is gone")

    def _break_off(self, reason: str) -> None:
        self._outgoing.break_off(reason)
        self._incoming.break_off(reason)


class MemoryLink(StandingLink):
    """One end of a link in memory."""

    def __init__(
        self,
        outgoing: _Direction,
        incoming: _Direction,
        handlers: LinkHandlers,
        faults: MemoryFaults,
        name: str,
        max_message_bytes: int,
    ) -> None:
        self._faults = faults
        channel = MemoryChannel(outgoing, incoming, faults)
        super().__init__(channel, handlers, name, None, max_message_bytes)

    def send(self, message: Message, on_sent: Callable[[], None] | None = None) -> None:
        """See `Link`."""
        self._faults.check_send()
        super().send(message, on_sent)


def memory_pair(
    handlers: tuple[LinkHandlers, LinkHandlers],
    settings: LinkSettings,
    faults: tuple[MemoryFaults, MemoryFaults] | None = None,
    name: str = "memory link",
) -> tuple[MemoryLink, MemoryLink]:
    """Both ends of a link.

    Args:
        handlers: of each end.
        settings: of which only the largest message matters.
        faults: of what each end sends.
    """
    there, back = _Direction(), _Direction()
    first, second = faults or (MemoryFaults(), MemoryFaults())
    limit = settings.max_message_bytes
    return (
        MemoryLink(there, back, handlers[0], first, f"{name}, one end", limit),
        MemoryLink(back, there, handlers[1], second, f"{name}, other end", limit),
    )
