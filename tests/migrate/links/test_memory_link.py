"""What a link in memory does when told to fail."""

from __future__ import annotations

import pytest
import torch

from migrate.links.interface import LinkDeadError, LinkError, LinkSettings, Message
from migrate.links.memory_link import MemoryFaults, memory_pair
from migrate.links.memory_network import MemoryNetwork
from tests.link_ends import WAIT_S, RecordingEnd

_SETTINGS = LinkSettings(connect_timeout_s=0.1)

Ends = tuple[RecordingEnd, RecordingEnd]


@pytest.fixture
def faults() -> MemoryFaults:
    """Of what the first end sends."""
    return MemoryFaults()


@pytest.fixture
def ends(faults: MemoryFaults) -> Ends:
    both = RecordingEnd(), RecordingEnd()
    both[0].link, both[1].link = memory_pair(
        (both[0].handlers, both[1].handlers), _SETTINGS, (faults, MemoryFaults()), "test"
    )
    return both


@pytest.mark.parametrize("count", [0, 3])
def test_it_dies_after_so_many_messages(faults: MemoryFaults, ends: Ends, count: int) -> None:
    faults.die_after(count)
    for index in range(6):
        try:
            ends[0].link.send(Message(0, index, 0), ends[0].on_sent)
        except LinkDeadError:
            assert index > count
    for end in ends:
        assert end.wait_for_death() == "the link broke, as it was told to"
    assert [message.work_id for message in ends[1].messages] == list(range(count))
    # A death may come before the `on_sent` of a message that arrived, and then it never comes.
    assert ends[0].sent <= count


def test_messages_are_held_until_they_are_released(faults: MemoryFaults, ends: Ends) -> None:
    faults.hold()
    source = torch.zeros(3)
    for index in range(3):
        ends[0].link.send(Message(0, index, 0, b"", (source,)), ends[0].on_sent)
    # The other way is open, so that this proves that time has passed.
    ends[1].link.send(Message(0, 7, 0), ends[1].on_sent)
    ends[0].wait_for_messages(1)
    assert (ends[1].messages, ends[0].sent, ends[0].link.counters.messages_sent) == ([], 0, 0)
    faults.release()
    assert [message.work_id for message in ends[1].wait_for_messages(3)] == [0, 1, 2]
    ends[0].wait_until(lambda: ends[0].sent == 3)
    ends[0].link.close()
    ends[1].wait_for_death()


def test_what_is_queued_when_a_link_is_closed_is_dropped(faults: MemoryFaults, ends: Ends) -> None:
    faults.hold()
    for index in range(3):
        ends[0].link.send(Message(0, index, 0), ends[0].on_sent)
    ends[0].link.close()
    faults.release()
    ends[1].wait_for_death()
    assert ends[0].link.join(WAIT_S)
    # The one that was being sent may have arrived, without a word to a sender who no longer listens.
    assert len(ends[1].messages) <= 1
    assert ends[0].sent == 0


def test_sends_are_refused_before_anybody_is_told_why(faults: MemoryFaults, ends: Ends) -> None:
    faults.refuse_sends("the peer is gone")
    with pytest.raises(LinkDeadError, match="the peer is gone"):
        ends[0].link.send(Message(0, 0, 0), ends[0].on_sent)
    assert (ends[0].deaths, ends[0].sent) == ([], 0)
    ends[1].link.close()
    ends[0].wait_for_death()


def test_a_peer_that_never_comes_is_an_error() -> None:
    connector = MemoryNetwork(_SETTINGS).connector("a")
    for epoch in (1, 2):
        with pytest.raises(LinkError, match=f"'b' did not connect to 'a' in epoch {epoch}"):
            connector.connect("b", epoch, RecordingEnd().handlers)
