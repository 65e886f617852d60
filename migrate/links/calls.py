"""Questions to other workers and their answers, over links.

Every question is answered exactly once: by the peer, or with an error when the peer cannot be reached, dies, or takes
longer than it may. A late answer is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from migrate.links.interface import Link, LinkCounters, LinkError, Message
from migrate.links.switchboard import Connector, Switchboard

ANSWER = 0
"""The kind of every answer; questions have others, numbered by the caller."""
_GOOD, _ERROR = b"\x00", b"\x01"
"""First byte of an answer's meta."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question."""

    meta: bytes = b""
    tensors: Tensors = ()
    error: str | None = None
    """Why there is nothing else."""


class Question:
    """One of a peer's. Whoever is given it calls `answer` or `refuse` once, from any thread."""

    def __init__(self, peer: str, message: Message, link: Callable[[], Link]) -> None:
        self.peer = peer
        self.message = message
        self._link = link

    def answer(self, meta: bytes = b"", tensors: Tensors = ()) -> None:
        """Tensors are kept until they are sent. A peer that is gone needs no answer: it is not told, and nor is the
        caller."""
        self._send(_GOOD + meta, tensors)

    def refuse(self, reason: str) -> None:
        """Says why not."""
        self._send(_ERROR + reason.encode("utf-8", "replace"), ())

    def _send(self, meta: bytes, tensors: Tensors) -> None:
        try:
            self._link().send(Message(ANSWER, self.message.work_id, self.message.version, meta, tensors))
        except LinkError:
            return  # whoever asked learns of it by the link's end


@dataclass(frozen=True, slots=True)
class _Asked:
    peer: str
    epoch: int
    done: Callable[[Answer], None]
    until_s: float


class LinkCalls:
    """The questions of one worker, and those that come to it. Safe to use from any thread; nothing waits but `close`.

    Args:
        worker: id of this worker.
        connector: makes its links.
        serve: called with each question that comes, from a thread of the link: it hands the work on.
        on_dead: called with peer, epoch and reason when a link has died, after the questions over it were answered.
    """

    def __init__(
        self,
        worker: str,
        connector: Connector,
        serve: Callable[[Question], None],
        on_dead: Callable[[str, int, str], None],
    ) -> None:
        self._serve = serve
        self._on_dead = on_dead
        self._lock = threading.Lock()
        self._asked: dict[int, _Asked] = {}
        self._work_ids = itertools.count()
        self._board = Switchboard(worker, connector, self._arrived, self._died)

    def connect(self, peer: str, epoch: int) -> Future[Link]:
        """See `Switchboard.connect`. Questions over the link of an earlier epoch end in errors."""
        future = self._board.connect(peer, epoch)
        self._fail(lambda asked: asked.peer == peer and asked.epoch < epoch, f"a new link to {peer!r} was asked for")
        return future

    def call(
        self,
        peer: str,
        kind: int,
        version: int,
        meta: bytes,
        tensors: Tensors,
        done: Callable[[Answer], None],
        until_s: float,
    ) -> None:
        """Asks `peer`, and does not wait. Questions to one peer arrive in the order in which they were asked.

        Args:
            kind: above 0.
            tensors: see `Message`; not to be written to before `done`.
            done: called once, from any thread, in this call already if need be.
            until_s: at an `expire` from then on it counts as unanswered.
        """
        work_id = next(self._work_ids)
        epoch = self._board.peers().get(peer, -1)
        with self._lock:
            self._asked[work_id] = _Asked(peer, epoch, done, until_s)
        try:
            self._board.link(peer).send(Message(kind, work_id, version, meta, tensors))
        except (LinkError, ValueError) as error:
            self._end(work_id, Answer(error=str(error)))

    def forget(self, peer: str) -> None:
        """See `Switchboard.forget`. Questions to it end in errors."""
        self._board.forget(peer)
        self._fail(lambda asked: asked.peer == peer, f"{peer!r} has left")

    def epoch(self, peer: str) -> int | None:
        """Of the link to `peer`, if there is one that lives."""
        return self._board.peers().get(peer)

    def counters(self) -> dict[str, tuple[int, LinkCounters]]:
        """By peer with a link that lives: its epoch, and what it has carried."""
        counters = {}
        for peer, epoch in self._board.peers().items():
            with contextlib.suppress(LinkError):  # it may have died just now
                counters[peer] = epoch, self._board.link(peer).counters
        return counters

    def expire(self, now_s: float) -> None:
        """To be called now and then: ends questions whose time is over."""
        self._fail(lambda asked: asked.until_s <= now_s, "it was not answered in time")

    def close(self, wait_s: float = 0.0) -> bool:
        """Ends all links; whether their threads have ended within `wait_s`. What was asked ends in errors."""
        ended = self._board.close(wait_s)
        self._fail(lambda _: True, "this worker has closed its links")
        return ended

    def _arrived(self, peer: str, message: Message) -> None:
        if message.kind != ANSWER:
            self._serve(Question(peer, message, lambda: self._board.link(peer)))
            return
        good, rest = message.meta[:1] == _GOOD, message.meta[1:]
        answer = Answer(rest, message.tensors) if good else Answer(error=rest.decode("utf-8", "replace"))
        self._end(message.work_id, answer, peer)

    def _died(self, peer: str, epoch: int, reason: str) -> None:
        self._fail(lambda asked: asked.peer == peer and asked.epoch <= epoch, f"the link to {peer!r} died: {reason}")
        self._on_dead(peer, epoch, reason)

    def _end(self, work_id: int, answer: Answer, peer: str | None = None) -> None:
        with self._lock:
            asked = self._asked.get(work_id)
            if asked is None or peer not in (None, asked.peer):
                return
            del self._asked[work_id]
        asked.done(answer)

    def _fail(self, concerns: Callable[[_Asked], bool], reason: str) -> None:
        with self._lock:
            concerned = [work_id for work_id, asked in self._asked.items() if concerns(asked)]
        for work_id in concerned:
            self._end(work_id, Answer(error=reason))
