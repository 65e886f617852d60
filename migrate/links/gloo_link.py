"""A link between two processes: a gloo process group of these two alone.

Over gloo's TCP transport a send completes when the peer has posted the read for it, and one that is longer than its
read ends the peer's process. So reads of frames have room for the longest, lengths of everything else come from a
checked header, and two ends meet only if they write the same format.

When a connection breaks, gloo wakes whoever waits for a read of which nothing has arrived yet, but not who waits for
one that is half done, nor for a send. So nobody waits for the former: behind every stretch of payload comes one byte
more, a *tick*, whose read is posted and waited for. A sender may find out late; its receiver does not.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from migrate.links.frames import FRAME_BYTES, Arrival, heartbeat_frame, message_frame, text_frame
from migrate.links.header import FORMAT_VERSION, FrameType
from migrate.links.interface import LinkError, LinkHandlers, LinkSettings, Message
from migrate.links.rendezvous import RendezvousAddress, forget_keys
from migrate.links.standing_link import ChannelBrokenError, Goodbye, Heartbeat, StandingLink

_distributed: Any = torch.distributed  # whose stubs do not say what it exports, and not all that a group has
_STRETCH_BYTES = 16 << 20
"""Payload from tick to tick, for which the timeout must suffice: so the length of a message is no matter."""
_TICK = torch.zeros(1, dtype=torch.uint8)
_TAG = 0
"""gloo keeps the order of what has the same tag."""
_UNUSED_TAG = 1
_LINGER = timedelta(seconds=0.5)
HEARTBEATS_A_TIMEOUT = 5


class GlooChannel:
    """The channel of one end of a two-member process group, which it owns."""

    def __init__(self, group: Any, rank: int, epoch: int, timeout_s: float, max_payload_bytes: int) -> None:
        self._group = group
        self._peer = 1 - rank
        self._epoch = epoch
        self._timeout_s = timeout_s
        self._max_payload_bytes = max_payload_bytes
        self._readable = True
        """Whether what has come so far made sense."""
        self._frame = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        self._posted = self._post(self._frame)

    def shake_hands(self, timeout: timedelta) -> None:
        """Hear from the peer that it is there, in the same epoch, and set up in the same way.

        Raises:
            LinkError: nothing came within `timeout`, or something else.
        """
        mine = f"timeout_s {self._timeout_s:g}, max_message_bytes {self._max_payload_bytes}"
        self._send(text_frame(FrameType.HELLO, self._epoch, mine))
        with _failures_of_gloo(timeout.total_seconds()):
            self._posted.wait(timeout)
        arrival = self._next_frame()
        if arrival.type is not FrameType.HELLO or arrival.text() != mine:
            # Closing now could overtake the hello. The peer's goodbye says that it has arrived.
            with contextlib.suppress(LinkError):
                self.goodbye("settings differ")
                self.receive()
            raise LinkError(f"the peer has {arrival.text() or 'no settings'}, this worker {mine}: give both the same")

    def transmit(self, message: Message) -> None:
        """See `Channel`."""
        frame, apart = message_frame(message, self._epoch)
        self._send(frame, *(piece for stretch in _stretches(apart) for piece in (*stretch, _TICK)))

    def heartbeat(self) -> None:
        """See `Channel`."""
        self._send(heartbeat_frame(self._epoch))

    def goodbye(self, reason: str) -> None:
        """See `Channel`."""
        self._send(text_frame(FrameType.GOODBYE, self._epoch, reason))

    def receive(self) -> Message | Heartbeat | Goodbye:
        """See `Channel`."""
        with _failures_of_gloo(self._timeout_s):
            self._posted.wait(timedelta(seconds=self._timeout_s))
        arrival = self._next_frame()
        if arrival.type is FrameType.GOODBYE:
            return Goodbye(arrival.text())
        return Heartbeat() if arrival.type is FrameType.HEARTBEAT else arrival.message()

    def release(self) -> None:
        """See `Channel`. The connection is closed."""
        if not self._readable:
            # Nobody has waited for the peer's goodbye, and the end of the connection could overtake ours: so wait for
            # what never comes, but for the peer to hang up.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty_like(_TICK)], self._peer, _UNUSED_TAG).wait(_LINGER)
        del self._posted
        self._group = None

    def _next_frame(self) -> Arrival:
        """Take the frame that has arrived, and all that belongs to it, and post the read of the next one."""
        self._readable = False
        arrival = Arrival(self._frame, self._epoch, self._max_payload_bytes)
        self._readable = True
        reads = [
            ([self._post(piece) for piece in stretch], self._post(torch.empty_like(_TICK)))
            for stretch in _stretches(arrival.apart)
        ]
        if arrival.type is not FrameType.GOODBYE:
            self._posted = self._post(self._frame)
        for pieces, tick in reads:
            self._wait([tick, *pieces])
        return arrival

    def _post(self, buffer: torch.Tensor) -> Any:
        with _failures_of_gloo(self._timeout_s):
            return self._group.recv([buffer], self._peer, _TAG)

    def _send(self, *buffers: torch.Tensor) -> None:
        with _failures_of_gloo(self._timeout_s):
            works = [self._group.send([buffer], self._peer, _TAG) for buffer in buffers]
        self._wait(works)

    def _wait(self, works: Sequence[Any]) -> None:
        """The timeout is that of each in turn, from the end of the last."""
        with _failures_of_gloo(self._timeout_s):
            for work in works:
                work.wait(timedelta(seconds=self._timeout_s))


@dataclass(frozen=True, slots=True)
class GlooConnector:
    """Makes the links of one worker."""

    worker: str
    """Id of this worker."""
    host: str
    """Name or address of this machine under which the peers reach it; gloo listens on that address alone."""
    rendezvous: RendezvousAddress
    """Where both ends find each other."""
    settings: LinkSettings

    def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> StandingLink:
        """Make the link to `peer`; waits until the peer has done the same, or for the time that settings allow.

        An epoch serves for one attempt, at both ends: what a failed one has left behind would mislead the next.

        Raises:
            LinkError: with what was tried and what to do.
            ValueError: a peer that is this worker, or an epoch that is negative.
        """
        if peer == self.worker or epoch < 0:
            raise ValueError(
                f"worker {self.worker!r} was to be linked to {peer!r} in epoch {epoch}; allowed are another worker "
                "and an epoch of 0 or more"
            )
        settings = self.settings
        started_s = time.monotonic()
        channel: GlooChannel | None = None
        try:
            channel = self._meet(peer, epoch, started_s + settings.connect_timeout_s)
        except (RuntimeError, LinkError) as error:
            failure = _first_line(error)
        if channel is None:  # raised here, because the cause's traceback would keep a half-made connection alive
            raise LinkError(
                f"no link from {self.worker!r} (at {self.host}) to {peer!r} in epoch {epoch} after "
                f"{time.monotonic() - started_s:.1f} s, by way of {self.rendezvous.host}:{self.rendezvous.port}: "
                f"{failure}. Both ends must connect, in the same new epoch, within connect_timeout_s "
                f"({settings.connect_timeout_s:g} s), run the same release, and reach each other at their hosts and "
                "that address; then try again with a higher epoch"
            )
        return StandingLink(
            channel,
            handlers,
            f"link {self.worker}-{peer}/{epoch}",
            settings.timeout_s / HEARTBEATS_A_TIMEOUT,
            settings.max_message_bytes,
        )

    def _meet(self, peer: str, epoch: int, deadline_s: float) -> GlooChannel:
        """A channel over which the peer has been heard.

        Raises:
            RuntimeError: of torch.
            LinkError: the peer speaks otherwise.
        """
        low, high = sorted((self.worker, peer))
        name = f"link{FORMAT_VERSION}:{len(low)}:{low}:{high}:{epoch}"
        rank = int(self.worker == high)
        # A store for each attempt: a call that waits would keep every other one of the same client waiting.
        store = _distributed.TCPStore(
            self.rendezvous.host, self.rendezvous.port, is_master=False, timeout=_until(deadline_s)
        )
        try:
            store.set_timeout(_until(deadline_s))
            options = _distributed.ProcessGroupGloo._Options()
            options._devices = [_device(self.host)]
            options._threads = 1  # for collectives, of which there are none
            options._timeout = _until(deadline_s)
            group = _distributed.ProcessGroupGloo(_distributed.PrefixStore(name, store), rank, 2, options)
            channel = GlooChannel(group, rank, epoch, self.settings.timeout_s, self.settings.max_message_bytes)
            channel.shake_hands(_until(deadline_s))
            return channel
        finally:
            forget_keys(store, name)


def _until(deadline_s: float) -> timedelta:
    return timedelta(seconds=max(0.1, deadline_s - time.monotonic()))


@functools.lru_cache
def _device(host: str) -> Any:
    """What listens, and moves the bytes of all links, in a thread of its own: one for the process."""
    return _distributed.ProcessGroupGloo.create_device(hostname=host)


def _stretches(buffers: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """All of `buffers` in order, as views in lists of at most `_STRETCH_BYTES`."""
    stretch: list[torch.Tensor] = []
    room = _STRETCH_BYTES
    for piece in (piece for buffer in buffers for piece in buffer.split(_STRETCH_BYTES)):
        if len(piece) > room:
            yield stretch
            stretch, room = [], _STRETCH_BYTES
        stretch.append(piece)
        room -= len(piece)
    if stretch:
        yield stretch


@contextlib.contextmanager
def _failures_of_gloo(timeout_s: float) -> Iterator[None]:
    """Errors of gloo as ours, in words that say what they mean for a link."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        # A thread whose own wait has not timed out is told that another's has.
        if "Timed out" in text or "Application timeout" in text:
            raise ChannelBrokenError(f"the peer neither sent nor took anything for {timeout_s:g} s") from error
        if "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text:
            raise ChannelBrokenError("the connection was closed by the peer, whose process may have ended") from error
        raise ChannelBrokenError(f"gloo failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
