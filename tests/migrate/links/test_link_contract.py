"""What every link promises, over each kind of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from migrate.links.frames import FRAME_BYTES
from migrate.links.interface import DTYPES, LinkDeadError, LinkSettings, Message
from migrate.links.rendezvous import RendezvousAddress
from tests.link_ends import WAIT_S, RecordingEnd, assert_same, gloo_ends, memory_ends, random_tensor

_SETTINGS = LinkSettings(timeout_s=30.0, connect_timeout_s=30.0, max_message_bytes=80 << 20)
_epochs = itertools.count(1)

Ends = tuple[RecordingEnd, RecordingEnd]


@pytest.fixture(params=["memory", "gloo"])
def ends(request: pytest.FixtureRequest, rendezvous: RendezvousAddress) -> Iterator[Ends]:
    make: Callable[[], Ends] = {
        "memory": lambda: memory_ends(_SETTINGS),
        "gloo": lambda: gloo_ends(rendezvous, _SETTINGS, epoch=next(_epochs)),
    }[request.param]
    both = make()
    yield both
    for end in both:
        end.link.close()
    for end in both:
        assert end.link.join(WAIT_S)
        assert len(end.deaths) <= 1


def test_messages_of_all_kinds_arrive_in_order(ends: Ends) -> None:
    def mixed(end: int) -> list[Message]:
        sizes = (0, 1, 3000, FRAME_BYTES, 3 * FRAME_BYTES)
        return [
            Message(
                index % 4, index, end, b"m" * (index % 7), (random_tensor((sizes[index % 5],), torch.uint8, index),)
            )
            for index in range(150)
        ]

    sent = mixed(0), mixed(1)
    for first, second in zip(*sent, strict=True):
        ends[0].link.send(first)
        ends[1].link.send(second)
    for end, expected in zip(ends, (sent[1], sent[0]), strict=True):
        for got, message in zip(end.wait_for_messages(len(expected)), expected, strict=True):
            assert_same(got, message)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2), (40_000,)], ids=str)
def test_every_dtype_arrives_as_it_was(ends: Ends, shape: tuple[int, ...]) -> None:
    message = Message(7, 2**63 - 1, 2**63 - 1, bytes(range(256)), tuple(random_tensor(shape, d, 1) for d in DTYPES))
    ends[0].link.send(message)
    assert_same(ends[1].wait_for_messages(1)[0], message)


def test_a_message_may_be_empty(ends: Ends) -> None:
    ends[0].link.send(Message(0, 0, 0))
    assert_same(ends[1].wait_for_messages(1)[0], Message(0, 0, 0))


def test_as_many_tensors_and_as_much_meta_as_are_allowed(ends: Ends) -> None:
    message = Message(1, 1, 1, b"x" * 300_000, tuple(random_tensor((n,), torch.int64, n) for n in range(256)))
    ends[0].link.send(message)
    assert_same(ends[1].wait_for_messages(1)[0], message)


@pytest.mark.parametrize("num_bytes", [100, 4 * FRAME_BYTES])
def test_sent_memory_may_be_written_and_received_memory_is_ones_own(ends: Ends, num_bytes: int) -> None:
    source = torch.full((num_bytes,), 1, dtype=torch.uint8)
    for value in (1, 2, 3):
        ends[0].link.send(Message(0, value, 0, b"", (source,)), ends[0].on_sent)
        ends[0].wait_until(lambda value=value: ends[0].sent == value)  # type: ignore[misc]
        source.fill_(value + 1)
    received = [message.tensors[0] for message in ends[1].wait_for_messages(3)]
    assert [tensor.unique().tolist() for tensor in received] == [[1], [2], [3]]
    received[0].fill_(9)
    assert [tensor.unique().tolist() for tensor in (source, *received)] == [[4], [9], [2], [3]]


def test_tensors_made_in_inference_mode_travel_too(ends: Ends) -> None:
    with torch.inference_mode():
        message = Message(0, 0, 0, b"", (torch.arange(10), torch.arange(100_000)))
    ends[0].link.send(message)
    assert_same(ends[1].wait_for_messages(1)[0], message)


def test_large_messages_both_ways_at_once(ends: Ends) -> None:
    sent = [Message(0, end, 0, b"", (torch.full((64 << 20,), end + 1, dtype=torch.uint8),)) for end in (0, 1)]
    for end, message in zip(ends, sent, strict=True):
        end.link.send(message, end.on_sent)
    for end, message in zip(ends, reversed(sent), strict=True):
        assert_same(end.wait_for_messages(1)[0], message)
        end.wait_until(lambda end=end: end.sent == 1)  # type: ignore[misc]


def test_each_of_several_senders_keeps_its_order(ends: Ends) -> None:
    def send_all(kind: int) -> None:
        for index in range(60):
            ends[0].link.send(Message(kind, index, 0, b"", (torch.full((kind,), index),)))

    senders = [threading.Thread(target=send_all, args=(kind,)) for kind in range(4)]
    for sender in senders:
        sender.start()
    messages = ends[1].wait_for_messages(4 * 60)
    for sender in senders:
        sender.join()
    for kind in range(4):
        assert [message.work_id for message in messages if message.kind == kind] == list(range(60))


def test_a_handler_may_answer(ends: Ends) -> None:

    def answer(message: Message) -> None:
        ends[1].link.send(Message(1, message.work_id, 0, b"", message.tensors))

    ends[1].react = answer
    sent = [Message(0, index, 0, b"", (torch.arange(index * 1000),)) for index in range(20)]
    for message in sent:
        ends[0].link.send(message)
    for got, message in zip(ends[0].wait_for_messages(20), sent, strict=True):
        assert got.kind == 1
        assert torch.equal(got.tensors[0], message.tensors[0])


def test_counters_are_exact(ends: Ends) -> None:
    # 3 + 4 * 8 + 0, 0, 2 * 70,000 bytes one way; 5 bytes the other.
    there = [
        Message(0, 0, 0, b"abc", (torch.zeros(4, dtype=torch.int64), torch.zeros(0))),
        Message(0, 0, 0),
        Message(0, 0, 0, b"", (torch.zeros(7, 10_000, dtype=torch.bfloat16),)),
    ]
    for message in there:
        ends[0].link.send(message, ends[0].on_sent)
    ends[1].link.send(Message(0, 0, 0, b"12345"), ends[1].on_sent)
    ends[0].wait_until(lambda: ends[0].sent == 3 and len(ends[0].messages) == 1)
    ends[1].wait_until(lambda: ends[1].sent == 1 and len(ends[1].messages) == 3)
    first, second = ends[0].link.counters, ends[1].link.counters
    assert (first.messages_sent, first.bytes_sent, first.messages_received, first.bytes_received) == (3, 140_035, 1, 5)
    assert (second.messages_sent, second.bytes_sent) == (1, 5)
    assert (second.messages_received, second.bytes_received) == (3, 140_035)


@pytest.mark.parametrize("closing", [0, 1])
def test_a_close_is_a_death_at_the_other_end_only(ends: Ends, closing: int) -> None:
    mine, other = ends[closing], ends[1 - closing]
    mine.link.send(Message(0, 0, 0), mine.on_sent)
    other.wait_for_messages(1)
    mine.link.close()
    mine.link.close()
    assert other.wait_for_death() == "the peer has ended it: closed"
    assert mine.link.join(WAIT_S)
    assert mine.deaths == []
    for end in ends:
        with pytest.raises(LinkDeadError, match="closed"):
            end.link.send(Message(0, 0, 0))


def test_both_ends_may_close_at_once(ends: Ends) -> None:
    for end in ends:
        end.link.close()
    for end in ends:
        assert end.link.join(WAIT_S)
        assert end.deaths == []


def test_a_close_while_large_messages_are_on_their_way_ends_both(ends: Ends) -> None:
    for end in ends:
        for _ in range(4):
            end.link.send(Message(0, 0, 0, b"", (torch.zeros(8 << 20, dtype=torch.uint8),)), end.on_sent)
    ends[1].wait_for_messages(1)
    ends[0].link.close()
    assert ends[1].wait_for_death() == "the peer has ended it: closed"
    assert ends[0].link.join(WAIT_S)
    assert ends[0].deaths == []


def test_nothing_is_delivered_after_a_close(ends: Ends) -> None:
    ends[0].link.close()
    seen = len(ends[0].messages)
    ends[1].wait_for_death()
    assert ends[0].link.join(WAIT_S)
    assert len(ends[0].messages) == seen == 0


def test_a_handler_that_raises_ends_the_link_at_both_ends(ends: Ends) -> None:
    def fail(message: Message) -> None:
        raise KeyError(message.work_id)

    ends[1].react = fail
    ends[0].link.send(Message(0, 5, 0))
    assert ends[1].wait_for_death() == "on_message raised KeyError: 5"
    assert ends[0].wait_for_death() == "the peer has ended it: on_message raised KeyError: 5"


def test_an_on_sent_that_raises_ends_the_link_at_both_ends(ends: Ends) -> None:
    def fail() -> None:
        raise ValueError("no")

    ends[0].link.send(Message(0, 5, 0), fail)
    assert ends[0].wait_for_death() == "on_sent raised ValueError: no"
    assert ends[1].wait_for_death() == "the peer has ended it: on_sent raised ValueError: no"


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message(-1, 0, 0), "kind of a message is -1; allowed are 0 to 2147483647"),
        (Message(0, 2**63, 0), "work_id of a message is 9223372036854775808"),
        (Message(0, 0, -5), "version of a message is -5"),
        (Message(0, 0, 0, b"", (torch.zeros(4, 4).t(),)), "contiguous: False"),
        (Message(0, 0, 0, b"", (torch.zeros(2), torch.zeros(2, device="meta"))), "tensor 1 of a message .* on meta"),
        (Message(0, 0, 0, b"", (torch.zeros(2).to_sparse(),)), "torch.sparse_coo"),
        (Message(0, 0, 0, b"", (torch.zeros(2, dtype=torch.complex64),)), "complex64; allowed are .*bfloat16"),
        (Message(0, 0, 0, b"", (torch.zeros((1,) * 9),)), "9 dimensions"),
        (Message(0, 0, 0, b"", (torch.zeros(1),) * 257), "257 tensors; allowed are 256"),
        (Message(0, 0, 0, b"1", (torch.empty(80 << 20, dtype=torch.uint8),)), "83886081 bytes; allowed are 83886080"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_link_can_carry_is_refused_and_the_link_lives_on(ends: Ends, message: Message, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ends[0].link.send(message)
    ends[0].link.send(Message(3, 0, 0))
    assert ends[1].wait_for_messages(1)[0].kind == 3
