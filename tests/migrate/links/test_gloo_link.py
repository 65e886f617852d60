"""What only a link over gloo can do: die with a process, fall silent, meet garbage."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from migrate.links.frames import FRAME_BYTES, Arrival, heartbeat_frame, message_frame
from migrate.links.gloo_link import GlooChannel, GlooConnector
from migrate.links.interface import LinkDeadError, LinkError, LinkSettings, Message
from migrate.links.rendezvous import RendezvousAddress
from migrate.links.standing_link import StandingLink
from tests.link_ends import WAIT_S, RecordingEnd, assert_same, gloo_ends, random_tensor
from tests.link_peer import EXIT, FLOOD_BYTES, FLOOD_MESSAGES

ROOT = Path(__file__).resolve().parents[3]
_PATIENT = LinkSettings(timeout_s=300.0, connect_timeout_s=WAIT_S)
"""With these, whatever happens in a test does not happen because of a timeout."""


@contextmanager
def _process(rendezvous: RendezvousAddress, what: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.link_peer", what, str(rendezvous.port), *arguments],
        cwd=ROOT,
        # Where nobody knows the name of an address, torch warns of that.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _connected(rendezvous: RendezvousAddress, settings: LinkSettings, peer: str, epoch: int) -> RecordingEnd:
    end = RecordingEnd()
    end.link = GlooConnector("home", "127.0.0.1", rendezvous, settings).connect(peer, epoch, end.handlers)
    return end


def _assert_echoes(end: RecordingEnd) -> None:
    message = Message(
        1, 2, 3, b"meta", (random_tensor((3, 1000), torch.bfloat16, 0), random_tensor((300_000,), torch.uint8, 1))
    )
    before = len(end.messages)
    end.link.send(message)
    assert_same(end.wait_for_messages(before + 1)[before], message)


def _close(*ends: RecordingEnd) -> None:
    for end in ends:
        end.link.close()
    for end in ends:
        assert end.link.join(WAIT_S)


def test_a_peer_that_is_killed_is_dead_at_once_and_comes_back_in_a_new_epoch(rendezvous: RendezvousAddress) -> None:
    with _process(rendezvous, "echo", "300", "other", "home", "1") as process:
        first = _connected(rendezvous, _PATIENT, "other", 1)
        _assert_echoes(first)
        process.kill()
        assert first.wait_for_death() == "the connection was closed by the peer, whose process may have ended"
    with pytest.raises(LinkDeadError, match="closed by the peer"):
        first.link.send(Message(0, 0, 0))
    with _process(rendezvous, "echo", "300", "other", "home", "2") as process:
        second = _connected(rendezvous, _PATIENT, "other", 2)
        _assert_echoes(second)
        # A process that ends in its own time, with a link open, ends well and says so.
        second.link.send(Message(EXIT, 0, 0))
        assert second.wait_for_death() == "the peer has ended it: closed"
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.fixture(scope="module")
def half_sent() -> Iterator[list[RecordingEnd]]:
    """Ends whose last send may end no sooner than its timeout; the other tests need not wait for them."""
    ends: list[RecordingEnd] = []
    yield ends
    for end in ends:
        end.wait_for_death()


def test_a_peer_that_is_killed_in_the_middle_of_large_messages_is_dead_too(
    rendezvous: RendezvousAddress, half_sent: list[RecordingEnd]
) -> None:
    # A send that is half done may end no sooner than the timeout, and the link's threads with it. The reason proves
    # that this end knew before.
    with _process(rendezvous, "echo", "20", "big", "home", "1") as process:
        end = _connected(rendezvous, LinkSettings(timeout_s=20.0, connect_timeout_s=WAIT_S), "big", 1)
        for _ in range(8):
            end.link.send(Message(0, 0, 0, b"", (torch.zeros(32 << 20, dtype=torch.uint8),)), end.on_sent)
        end.wait_for_messages(1)
        half_sent.append(end)
        process.kill()
        end.wait_until(lambda: bool(end.deaths))
        assert "closed by the peer" in end.deaths[0]


def test_an_idle_link_outlives_its_timeout_and_a_silent_peer_does_not(rendezvous: RendezvousAddress) -> None:
    with _process(rendezvous, "echo", "2", "silent", "home", "1") as process:
        end = _connected(rendezvous, LinkSettings(timeout_s=2.0, connect_timeout_s=WAIT_S), "silent", 1)
        # Five heartbeats go out in the time of a timeout.
        while end.link.counters.heartbeats_received < 8:
            assert not end.link.join(0.05)
        _assert_echoes(end)
        assert end.deaths == []
        process.send_signal(signal.SIGSTOP)
        end.link.send(Message(0, 0, 0, b"", (torch.zeros(32 << 20, dtype=torch.uint8),)), end.on_sent)
        assert end.wait_for_death() == "the peer neither sent nor took anything for 2 s"
        assert end.sent == 0


def test_three_processes_in_a_cycle_send_large_messages_to_each_other_at_once(rendezvous: RendezvousAddress) -> None:
    names = ["x", "y", "z"]
    with (
        _process(rendezvous, "flood", "300", "x", "y", "z") as x,
        _process(rendezvous, "flood", "300", "y", "z", "x") as y,
        _process(rendezvous, "flood", "300", "z", "x", "y") as z,
    ):
        sums = [FLOOD_BYTES * (index + 1) for index in range(FLOOD_MESSAGES)]
        for name, process in zip(names, (x, y, z), strict=True):
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {other: sums for other in names if other != name}
        for process in (x, y, z):
            _, errors = process.communicate()
            assert (process.returncode, errors) == (0, "")


def test_many_links_in_one_process_have_nothing_to_do_with_each_other(rendezvous: RendezvousAddress) -> None:
    pairs = [gloo_ends(rendezvous, _PATIENT, ("hub", f"spoke {index}/:{index}")) for index in range(8)]
    pairs[3][1].link.close()
    assert pairs[3][0].wait_for_death() == "the peer has ended it: closed"
    for index, (hub, spoke) in enumerate(pairs):
        if index != 3:
            hub.link.send(Message(index, 0, 0))
            assert [message.kind for message in spoke.wait_for_messages(1)] == [index]
            assert (hub.deaths, spoke.deaths) == ([], [])
            _close(hub, spoke)


class _RawPeer:
    """The other end of a link as a bare process group, which can say anything."""

    def __init__(self, port: int, name: str, settings: LinkSettings) -> None:
        self.end = RecordingEnd()

        def group(rank: int) -> Any:
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S))
            return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, timedelta(seconds=WAIT_S))

        with ThreadPoolExecutor(2) as pool:
            mine, self._group = pool.map(group, (0, 1))
        channel = GlooChannel(mine, 0, 4, settings.timeout_s, settings.max_message_bytes)
        self.end.link = StandingLink(channel, self.end.handlers, name, None, settings.max_message_bytes)

    def say(self, *buffers: torch.Tensor) -> None:
        for buffer in buffers:
            self._group.send([buffer], 0, 0).wait()

    def hang_up(self) -> None:
        self._group = None

    def hear(self) -> Arrival:
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8)
        self._group.recv([frame], 0, 0).wait()
        return Arrival(frame, 4, FRAME_BYTES)


@pytest.fixture
def raw_peer(rendezvous: RendezvousAddress) -> Iterator[Callable[..., _RawPeer]]:
    # A rendezvous of its own: bare groups leave their keys behind.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[_RawPeer] = []

    def make(settings: LinkSettings = _PATIENT) -> _RawPeer:
        made.append(_RawPeer(store.port, f"raw {len(made)}", settings))
        return made[-1]

    yield make
    for peer in made:
        peer.hang_up()
        assert peer.end.link.join(WAIT_S)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (torch.frombuffer(bytearray(b"GET / HTTP/1.1\r\n\r\n" * 5), dtype=torch.uint8), "no header of a link"),
        (torch.full((FRAME_BYTES,), 255, dtype=torch.uint8), "no header of a link"),
        (heartbeat_frame(3), "a frame of epoch 3 came over a link of epoch 4"),
        (message_frame(Message(0, 0, 0, b"", (torch.zeros(2000),)), 4)[0], "announces 8000 bytes; allowed are 1000"),
    ],
    ids=["text", "ones", "epoch", "size"],
)
def test_garbage_ends_its_link_with_the_reason_at_both_ends_and_no_other(
    raw_peer: Callable[..., _RawPeer], frame: torch.Tensor, complaint: str
) -> None:
    settings = LinkSettings(timeout_s=300.0, max_message_bytes=1000)
    healthy, sick = raw_peer(settings), raw_peer(settings)
    sick.say(message_frame(Message(1, 0, 0, b"good"), 4)[0], frame)
    goodbye = sick.hear()
    assert complaint in sick.end.wait_for_death()
    assert complaint in goodbye.text()
    assert [message.meta for message in sick.end.messages] == [b"good"]
    healthy.say(message_frame(Message(1, 0, 0, b"well"), 4)[0])
    assert healthy.end.wait_for_messages(1)[0].meta == b"well"
    assert healthy.end.deaths == []


def test_a_damaged_header_costs_the_link_and_not_the_process(raw_peer: Callable[..., _RawPeer]) -> None:
    frame, _ = message_frame(Message(1, 0, 0, b"", (torch.zeros(1 << 20),)), 4)
    frame[66] ^= 1  # of the shape, by which a read would be posted
    peer = raw_peer()
    peer.say(frame)
    assert "a header's checksum is wrong" in peer.hear().text()
    assert "a header's checksum is wrong" in peer.end.wait_for_death()


@pytest.mark.parametrize(
    "other", [{"max_message_bytes": 1000}, {"timeout_s": 301.0}], ids=lambda other: next(iter(other))
)
def test_settings_that_differ_are_an_error_at_both_ends(rendezvous: RendezvousAddress, other: dict[str, Any]) -> None:
    settings = _PATIENT, dataclasses.replace(_PATIENT, **other)
    name = next(iter(other))

    def connect(index: int) -> Any:
        connector = GlooConnector(f"{name} {index}", "127.0.0.1", rendezvous, settings[index])
        return connector.connect(f"{name} {1 - index}", 1, RecordingEnd().handlers)

    with ThreadPoolExecutor(2) as pool:
        attempts = [pool.submit(connect, index) for index in (0, 1)]
    for attempt in attempts:
        with pytest.raises(LinkError, match=r"the peer has timeout_s .*, this worker timeout_s .*: give both the same"):
            attempt.result()


def test_a_peer_that_never_comes_is_an_error_that_says_what_to_do(rendezvous: RendezvousAddress) -> None:
    impatient = LinkSettings(connect_timeout_s=0.5)
    with pytest.raises(
        LinkError,
        match=rf"no link from 'early' .* to 'late' in epoch 7 .* 127\.0\.0\.1:{rendezvous.port}: .*higher epoch",
    ):
        GlooConnector("early", "127.0.0.1", rendezvous, impatient).connect("late", 7, RecordingEnd().handlers)
    # What the attempt has left behind is in nobody's way.
    ends = gloo_ends(rendezvous, _PATIENT, ("early", "late"), epoch=8)
    ends[0].link.send(Message(1, 0, 0))
    ends[1].wait_for_messages(1)
    _close(*ends)


@pytest.mark.parametrize(
    ("host", "port", "own"),
    [("127.0.0.1", 1, "127.0.0.1"), ("127.0.0.1", 0, "no-such-host.invalid")],
    ids=["port", "own"],
)
def test_an_address_that_leads_nowhere_is_an_error(
    rendezvous: RendezvousAddress, host: str, port: int, own: str
) -> None:
    address = RendezvousAddress(host, port or rendezvous.port)
    with pytest.raises(LinkError, match=rf"no link from 'a' \(at {own}\).*{host}:{address.port}"):
        GlooConnector("a", own, address, LinkSettings(connect_timeout_s=0.5)).connect("b", 1, RecordingEnd().handlers)


@pytest.mark.parametrize(("peer", "epoch"), [("a", 1), ("b", -1)])
def test_no_link_to_oneself_or_before_all_epochs(rendezvous: RendezvousAddress, peer: str, epoch: int) -> None:
    with pytest.raises(ValueError, match=f"linked to '{peer}' in epoch {epoch}"):
        GlooConnector("a", "127.0.0.1", rendezvous, _PATIENT).connect(peer, epoch, RecordingEnd().handlers)


@pytest.mark.parametrize(
    "settings", [{"timeout_s": 0.0}, {"connect_timeout_s": float("nan")}, {"max_message_bytes": 0}]
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is .*; allowed are"):
        LinkSettings(**settings)
