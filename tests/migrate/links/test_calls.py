"""Questions and answers between workers: answered exactly once, whatever happens to the link."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from migrate.links.calls import Answer, LinkCalls, Question
from migrate.links.interface import LinkSettings
from migrate.links.memory_network import MemoryNetwork
from tests.link_ends import WAIT_S

SETTINGS = LinkSettings(timeout_s=60.0, connect_timeout_s=WAIT_S)
NEVER_S = float("inf")


class Asker:
    """A worker's calls, and the answers that came."""

    def __init__(self, network: MemoryNetwork, name: str, serve: Callable[[Question], None]) -> None:
        self.name = name
        self.answers: list[tuple[str, Answer]] = []
        self.deaths: list[tuple[str, int]] = []
        self._changed = threading.Condition()
        self.calls = LinkCalls(name, network.connector(name), serve, self._dead)

    def ask(self, peer: str, name: str, until_s: float = NEVER_S, tensors: tuple[torch.Tensor, ...] = ()) -> None:
        def done(answer: Answer) -> None:
            with self._changed:
                self.answers.append((name, answer))
                self._changed.notify_all()

        self.calls.call(peer, 7, 3, name.encode(), tensors, done, until_s)

    def wait(self, count: int) -> list[tuple[str, Answer]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.answers) >= count, WAIT_S)
            return self.answers

    def wait_for_death(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(self.deaths), WAIT_S)

    def _dead(self, peer: str, epoch: int, reason: str) -> None:
        with self._changed:
            self.deaths.append((peer, epoch))
            self._changed.notify_all()


def refuse_all(question: Question) -> None:
    question.refuse("nothing is done here")


def join(network: MemoryNetwork, serve: Callable[[Question], None]) -> tuple[Asker, Asker]:
    """One that asks, and one that serves."""
    asker, server = Asker(network, "a", refuse_all), Asker(network, "b", serve)
    futures = asker.calls.connect("b", 0), server.calls.connect("a", 0)
    for future in futures:
        future.result(WAIT_S)
    return asker, server


def close(*askers: Asker) -> None:
    for asker in askers:
        assert asker.calls.close(WAIT_S)


def echo(question: Question) -> None:
    question.answer(question.message.meta[::-1], tuple(tensor * 2 for tensor in question.message.tensors))


def test_answers_come_to_their_questions_both_ways() -> None:
    asker, server = join(MemoryNetwork(SETTINGS), echo)
    for number in range(50):
        asker.ask("b", f"question {number}", tensors=(torch.full((3,), number),))
    server.ask("a", "back")
    for number, (name, answer) in enumerate(asker.wait(50)):
        assert name == f"question {number}"
        assert (answer.meta, answer.error) == (name.encode()[::-1], None)
        assert answer.tensors[0].tolist() == [2 * number] * 3
    assert server.wait(1) == [("back", Answer(error="nothing is done here"))]
    close(asker, server)


def test_a_peer_without_a_link_is_an_error_at_once() -> None:
    asker, server = join(MemoryNetwork(SETTINGS), echo)
    asker.ask("nobody", "q")
    ((_, answer),) = asker.answers
    assert answer.error is not None
    assert "has no link to 'nobody'" in answer.error
    close(asker, server)


def test_what_no_link_can_carry_is_an_error() -> None:
    asker, server = join(MemoryNetwork(LinkSettings(connect_timeout_s=WAIT_S, max_message_bytes=100)), echo)
    asker.ask("b", "q", tensors=(torch.zeros(1000),))
    ((_, answer),) = asker.answers
    assert answer.error is not None
    assert "allowed are 100" in answer.error
    close(asker, server)


def test_a_question_whose_time_is_over_is_answered_once() -> None:
    held: queue.SimpleQueue[Question] = queue.SimpleQueue()
    asker, server = join(MemoryNetwork(SETTINGS), held.put)
    asker.ask("b", "early", until_s=10.0)
    asker.ask("b", "late", until_s=20.0)
    asker.calls.expire(9.9)
    assert asker.answers == []
    asker.calls.expire(10.0)
    assert asker.answers == [("early", Answer(error="it was not answered in time"))]
    for _ in range(2):  # the first answer comes too late
        held.get(timeout=WAIT_S).answer(b"x")
    assert asker.wait(2)[1] == ("late", Answer(b"x"))
    close(asker, server)
    assert len(asker.answers) == 2


def test_a_link_that_dies_answers_what_was_asked_over_it() -> None:
    network = MemoryNetwork(SETTINGS)
    asker, server = join(network, lambda question: None)
    asker.ask("b", "one")
    network.faults("a", "b").die_after(1)
    asker.ask("b", "two")
    asker.ask("b", "three")
    asker.wait_for_death()
    answers = asker.wait(3)
    assert sorted(name for name, _ in answers) == ["one", "three", "two"]
    assert all("died" in str(answer.error) or "dead" in str(answer.error) for _, answer in answers)
    assert asker.deaths == [("b", 0)]
    close(asker, server)


def test_a_new_epoch_answers_what_was_asked_over_the_old_link() -> None:
    network = MemoryNetwork(SETTINGS)
    asker, server = join(network, lambda question: None)
    asker.ask("b", "old")
    futures = asker.calls.connect("b", 1), server.calls.connect("a", 1)
    assert asker.wait(1) == [("old", Answer(error="a new link to 'b' was asked for"))]
    for future in futures:
        future.result(WAIT_S)
    asker.ask("b", "new")
    close(asker, server)
    assert asker.wait(2)[1] == ("new", Answer(error="this worker has closed its links"))
