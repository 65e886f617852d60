"""Ends of links for tests: what they were told, and waiting for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from migrate.links.gloo_link import GlooConnector
from migrate.links.interface import Link, LinkHandlers, LinkSettings, Message
from migrate.links.memory_link import memory_pair
from migrate.links.rendezvous import RendezvousAddress

WAIT_S = 60.0
"""Long enough for a machine with other things to do; nothing waits so long where all is well."""


class RecordingEnd:
    """One end's handlers: keeps what they are called with."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.deaths: list[str] = []
        self.sent = 0
        self.react: Callable[[Message], None] | None = None
        """What `on_message` does besides."""
        self._changed = threading.Condition()
        self.handlers = LinkHandlers(self._on_message, self._on_dead)
        self.link: Link

    def on_sent(self) -> None:
        with self._changed:
            self.sent += 1
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a call of a handler, or of `on_sent`, makes true."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (len(self.messages), self.deaths, self.sent)

    def wait_for_messages(self, count: int) -> list[Message]:
        self.wait_until(lambda: len(self.messages) >= count)
        return self.messages

    def wait_for_death(self) -> str:
        """The reason; that it is the only one is checked once the link's threads are gone."""
        self.wait_until(lambda: bool(self.deaths))
        assert self.link.join(WAIT_S)
        assert len(self.deaths) == 1
        return self.deaths[0]

    def _on_message(self, message: Message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        if self.react is not None:
            self.react(message)

    def _on_dead(self, reason: str) -> None:
        with self._changed:
            self.deaths.append(reason)
            self._changed.notify_all()


def memory_ends(settings: LinkSettings) -> tuple[RecordingEnd, RecordingEnd]:
    ends = RecordingEnd(), RecordingEnd()
    ends[0].link, ends[1].link = memory_pair((ends[0].handlers, ends[1].handlers), settings)
    return ends


def gloo_ends(
    rendezvous: RendezvousAddress, settings: LinkSettings, names: tuple[str, str] = ("a", "b"), epoch: int = 1
) -> tuple[RecordingEnd, RecordingEnd]:
    """Both ends in this process."""
    ends = RecordingEnd(), RecordingEnd()

    def connect(index: int) -> Link:
        connector = GlooConnector(names[index], "127.0.0.1", rendezvous, settings)
        return connector.connect(names[1 - index], epoch, ends[index].handlers)

    with ThreadPoolExecutor(2) as pool:
        ends[0].link, ends[1].link = pool.map(connect, (0, 1))
    return ends


def assert_same(got: Message, sent: Message) -> None:
    """Equal to the last bit, NaNs included."""
    assert (got.kind, got.work_id, got.version, got.meta) == (sent.kind, sent.work_id, sent.version, sent.meta)
    assert [(each.dtype, each.shape) for each in got.tensors] == [(each.dtype, each.shape) for each in sent.tensors]
    for mine, theirs in zip(got.tensors, sent.tensors, strict=True):
        assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
