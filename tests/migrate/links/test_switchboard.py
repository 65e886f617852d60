"""The links of a worker, over each way to make them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from migrate.links.gloo_link import GlooConnector
from migrate.links.interface import Link, LinkDeadError, LinkError, LinkHandlers, LinkSettings, Message
from migrate.links.memory_link import memory_pair
from migrate.links.memory_network import MemoryNetwork
from migrate.links.rendezvous import RendezvousAddress
from migrate.links.switchboard import Connector, Switchboard
from tests.link_ends import WAIT_S, RecordingEnd

_QUICK = LinkSettings(timeout_s=60.0, connect_timeout_s=0.5)
_PATIENT = LinkSettings(timeout_s=60.0, connect_timeout_s=WAIT_S)


class _Worker:
    """A switchboard, and what it was told."""

    def __init__(self, name: str, connector: Connector) -> None:
        self.name = name
        self.messages: list[tuple[str, int]] = []
        self.deaths: list[tuple[str, int, str]] = []
        self._changed = threading.Condition()
        self.board = Switchboard(name, connector, self._message, self._dead)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.messages, self.deaths)

    def _message(self, peer: str, message: Message) -> None:
        with self._changed:
            self.messages.append((peer, message.work_id))
            self._changed.notify_all()

    def _dead(self, peer: str, epoch: int, reason: str) -> None:
        with self._changed:
            self.deaths.append((peer, epoch, reason))
            self._changed.notify_all()


MakeWorker = Callable[..., _Worker]


@pytest.fixture(params=["memory", "gloo"])
def worker(request: pytest.FixtureRequest, rendezvous: RendezvousAddress) -> Iterator[MakeWorker]:
    networks = {settings: MemoryNetwork(settings) for settings in (_QUICK, _PATIENT)}
    made: list[_Worker] = []

    def make(name: str, settings: LinkSettings = _PATIENT) -> _Worker:
        # Names of a test's own: epochs are used up, and the rendezvous is shared.
        own = f"{request.node.name} {name}"
        memory = request.param == "memory"
        connector = (
            networks[settings].connector(own) if memory else GlooConnector(own, "127.0.0.1", rendezvous, settings)
        )
        made.append(_Worker(own, connector))
        return made[-1]

    yield make
    for each in made:
        each.board.close()
    for each in made:
        assert each.board.close(WAIT_S)


def _link(a: _Worker, b: _Worker, epoch: int) -> tuple[Link, Link]:
    futures = a.board.connect(b.name, epoch), b.board.connect(a.name, epoch)
    return futures[0].result(WAIT_S), futures[1].result(WAIT_S)


def test_workers_in_a_cycle_know_who_says_what(worker: MakeWorker) -> None:
    a, b, c = worker("a"), worker("b"), worker("c")
    for first, second in ((a, b), (b, c), (c, a)):
        _link(first, second, 1)
    for number, (sender, receiver) in enumerate([(a, b), (b, c), (c, a), (a, c), (c, b), (b, a)]):
        sender.board.link(receiver.name).send(Message(0, number, 0))
    for receiver, expected in ((a, {(c.name, 2), (b.name, 5)}), (b, {(a.name, 0), (c.name, 4)})):
        receiver.wait_until(lambda receiver=receiver: len(receiver.messages) == 2)  # type: ignore[misc]
        assert set(receiver.messages) == expected
    assert a.board.peers() == {b.name: 1, c.name: 1}


def test_a_new_epoch_replaces_the_old_one(worker: MakeWorker) -> None:
    a, b = worker("a"), worker("b")
    old, _ = _link(a, b, 1)
    new, _ = _link(a, b, 5)
    with pytest.raises(LinkDeadError):
        old.send(Message(0, 0, 0))
    assert a.board.link(b.name) is new
    assert a.board.peers() == {b.name: 5}
    new.send(Message(0, 3, 0))
    b.wait_until(lambda: b.messages == [(a.name, 3)])
    # Whoever closed first told the other; a death of the old epoch says so, and is none of the new one.
    assert {epoch for _, epoch, _ in a.deaths + b.deaths} <= {1}


@pytest.mark.parametrize("epoch", [4, 5])
def test_an_epoch_that_is_not_newer_is_refused_even_after_a_death(worker: MakeWorker, epoch: int) -> None:
    a, b = worker("a"), worker("b")
    _link(a, b, 5)
    b.board.close()
    a.wait_until(lambda: bool(a.deaths))
    with pytest.raises(LinkError, match=rf"in epoch {epoch}, and has tried epoch 5: give both ends a higher one"):
        a.board.connect(b.name, epoch)


def test_a_death_is_told_once_and_the_link_is_no_longer_there(worker: MakeWorker) -> None:
    a, b, c = worker("a"), worker("b"), worker("c")
    _link(a, b, 1)
    _link(a, c, 1)
    assert b.board.close(WAIT_S)
    a.wait_until(lambda: bool(a.deaths))
    assert a.deaths == [(b.name, 1, "the peer has ended it: closed")]
    assert b.deaths == []
    with pytest.raises(LinkDeadError, match=r"of epoch 1 is dead: the peer has ended it: closed"):
        a.board.link(b.name)
    assert a.board.peers() == {c.name: 1}
    a.board.link(c.name).send(Message(0, 9, 0))
    c.wait_until(lambda: c.messages == [(a.name, 9)])


def test_what_is_forgotten_may_begin_again(worker: MakeWorker) -> None:
    a, b = worker("a"), worker("b")
    for _ in range(5):
        # Memory and gloo links alike: both ends forget, so the epoch is new to them.
        link, _ = _link(a, b, 1)
        a.board.forget(b.name)
        b.board.forget(a.name)
        assert link.join(WAIT_S)
        with pytest.raises(LinkError, match=r"no link to .*: connect first"):
            a.board.link(b.name)
    assert (a.board.peers(), b.board.peers()) == ({}, {})
    a.board.forget("nobody")


def test_a_peer_that_does_not_come_costs_the_epoch(worker: MakeWorker) -> None:
    a, b = worker("a", _QUICK), worker("b", _QUICK)
    attempt = a.board.connect(b.name, 1)
    with pytest.raises(LinkError, match="is still being made"):
        a.board.link(b.name)
    with pytest.raises(LinkError, match="in epoch 1"):
        attempt.result(WAIT_S)
    with pytest.raises(LinkDeadError, match="in epoch 1"):
        a.board.link(b.name)
    assert (a.board.peers(), a.deaths) == ({}, [])


def test_an_attempt_that_is_no_longer_wanted_ends_in_an_error_at_both_ends(worker: MakeWorker) -> None:
    a, b = worker("a"), worker("b")
    overtaken = a.board.connect(b.name, 1)
    wanted = a.board.connect(b.name, 2)
    late: Future[Link] = b.board.connect(a.name, 1)
    with pytest.raises(LinkError, match="epoch 1 is no longer wanted"):
        overtaken.result(WAIT_S)
    # Its other end was made, and told at once.
    late.result(WAIT_S)
    b.wait_until(lambda: bool(b.deaths))
    b.board.connect(a.name, 2).result(WAIT_S)
    link = wanted.result(WAIT_S)
    assert a.board.link(b.name) is link


def test_a_closed_switchboard_makes_no_links(worker: MakeWorker) -> None:
    a, b = worker("a"), worker("b")
    _link(a, b, 1)
    assert a.board.close(WAIT_S)
    with pytest.raises(LinkError, match="are closed"):
        a.board.connect(b.name, 2)
    with pytest.raises(LinkError, match="connect first"):
        a.board.link(b.name)
    assert a.deaths == []


def test_an_attempt_under_way_when_the_switchboard_is_closed_comes_to_nothing(worker: MakeWorker) -> None:
    a, b = worker("a"), worker("b")
    attempt = a.board.connect(b.name, 1)
    assert a.board.close(WAIT_S)
    b.board.connect(a.name, 1).result(WAIT_S)
    with pytest.raises(LinkError, match="no longer wanted"):
        attempt.result(WAIT_S)
    b.wait_until(lambda: bool(b.deaths))
    assert a.deaths == []


@pytest.mark.parametrize(("peer", "epoch"), [("", 1), ("b", -1)])
def test_what_cannot_be_a_link_is_refused(worker: MakeWorker, peer: str, epoch: int) -> None:
    a = worker("a")
    with pytest.raises(ValueError, match="allowed are another worker and an epoch of 0 or more"):
        a.board.connect(peer or a.name, epoch)


def test_a_link_may_die_before_the_attempt_has_returned() -> None:
    told = threading.Event()

    class DeadBeforeItIsThere:
        def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> Link:
            nobody = LinkHandlers(lambda _: None, lambda _: None)
            mine, others = memory_pair((handlers, nobody), _QUICK)
            others.close()
            assert told.wait(WAIT_S)
            return mine

    board = Switchboard("a", DeadBeforeItIsThere(), lambda *_: None, lambda *_: told.set())
    link = board.connect("b", 1).result(WAIT_S)
    with pytest.raises(LinkDeadError, match="closed"):
        link.send(Message(0, 0, 0))
    with pytest.raises(LinkDeadError, match="closed"):
        board.link("b")
    assert board.peers() == {}


def test_a_message_that_comes_before_the_attempt_has_returned_can_be_answered() -> None:
    answers = RecordingEnd()

    class QuickPeer:
        def connect(self, peer: str, epoch: int, handlers: LinkHandlers) -> Link:
            mine, answers.link = memory_pair((handlers, answers.handlers), _QUICK)
            answers.link.send(Message(0, 6, 0))
            while mine.counters.messages_received == 0:
                assert not mine.join(0.01)
            return mine

    board = Switchboard("a", QuickPeer(), lambda peer, message: board.link(peer).send(message), lambda *_: None)
    board.connect("b", 1)
    assert answers.wait_for_messages(1)[0].work_id == 6
    assert board.close(WAIT_S)
