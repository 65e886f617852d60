"""Staged copies over a device that does its work as late, and in as odd an order, as events allow."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.device_event import DeviceEvent
from actors.engine.staging import StagedCopies
from load_tests.deferred_streams import DeferredEvent, DeferredStreams

PAGES, WORDS = 24, 3
PAGE_BYTES = 8 * WORDS


class Rig:
    """Staged copies, and what the pages must hold when all is done that was asked for."""

    def __init__(self, streams: DeferredStreams, *, num_slots: int = 2, slot_pages: int = 3) -> None:
        self.streams = streams
        self.pages = torch.arange(PAGES * WORDS).view(PAGES, WORDS).clone()
        self.expected = self.pages.clone()
        streams.compute.keep(self.pages)
        self.copies = StagedCopies(self.pages, streams, num_slots=num_slots, slot_bytes=slot_pages * PAGE_BYTES)
        self.marks = [self.copies.mark]
        self.touched = [0] * PAGES
        """By page: which mark comes after all that was computed there."""

    def compute(self, first: int, count: int, summand: int) -> None:
        """A step over some pages."""
        with self.streams.compute.use():
            self.pages[first : first + count].add_(summand).mul_(3)
        self.expected[first : first + count].add_(summand).mul_(3)
        self.touched[first : first + count] = [len(self.marks)] * len(self.touched[first : first + count])
        self.marks.append(self.copies.computed())

    def after(self, index: list[int], is_exact: bool) -> DeviceEvent | None:
        """What a copy of these pages has to wait for."""
        return self.marks[max((self.touched[page] for page in index), default=0)] if is_exact else None

    def read(self, index: list[int], is_exact: bool = False) -> bool:
        """Whether what is read is what must be there."""
        target = torch.full((len(index), WORDS), -1)
        self.copies.read(torch.tensor(index, dtype=torch.int64), target, self.after(index, is_exact))
        return torch.equal(target, self.expected[index])

    def write(self, index: list[int], seed: int, is_exact: bool = False, host_waits: bool = True) -> None:
        """Stores numbers, after which the host waits, or computing does."""
        source = torch.randint(-(2**63), 2**63 - 1, (len(index), WORDS), generator=torch.Generator().manual_seed(seed))
        self.expected[index] = source
        copied = self.copies.write(torch.tensor(index, dtype=torch.int64), source, self.after(index, is_exact))
        source.fill_(-2)  # it is the caller's again
        if host_waits:
            copied.synchronize()
        else:
            with self.streams.compute.use():
                copied.wait()
            self.marks.append(self.copies.computed())
            for page in index:
                self.touched[page] = len(self.marks) - 1

    def is_right(self) -> bool:
        """Whether the pages hold what they must once all is done."""
        self.copies.computed().synchronize()
        return torch.equal(self.pages, self.expected)


indices = st.lists(st.integers(0, PAGES - 1), max_size=PAGES, unique=True)
actions = st.one_of(
    st.tuples(st.just("compute"), st.integers(0, PAGES - 1), st.integers(1, PAGES), st.integers(-9, 9)),
    st.tuples(st.just("read"), indices, st.booleans()),
    st.tuples(st.just("write"), indices, st.integers(0, 99), st.booleans(), st.booleans()),
)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 5), st.lists(actions, max_size=20))
def test_every_copy_is_right_to_the_bit_whatever_runs_when(
    seed: int, num_slots: int, slot_pages: int, todo: list[tuple[str, ...]]
) -> None:
    rig = Rig(DeferredStreams(random.Random(seed)), num_slots=num_slots, slot_pages=slot_pages)
    for name, *arguments in todo:
        assert getattr(rig, name)(*arguments) is not False
    assert rig.is_right()


class NoStreamWaits(DeferredStreams):
    """Streams are not ordered by events."""

    def record(self) -> DeviceEvent:
        event = super().record()
        assert isinstance(event, DeferredEvent)
        event.wait = lambda: None  # type: ignore[method-assign]
        return event


class NoHostWaits(DeferredStreams):
    """The host goes on before the device has come to an event."""

    def record(self) -> DeviceEvent:
        event = super().record()
        assert isinstance(event, DeferredEvent)
        if event.stream is not self.compute:  # which the test itself waits for at the end
            event.synchronize = lambda: None  # type: ignore[method-assign]
        return event


@pytest.mark.parametrize("careless", [NoStreamWaits, NoHostWaits])
@pytest.mark.parametrize("action", ["read", "write", "write again"])
def test_a_wait_that_is_left_out_is_noticed(careless: type[DeferredStreams], action: str) -> None:
    """What the tests of this file rest on."""
    index = list(range(PAGES))

    def run(streams: DeferredStreams) -> bool:
        rig = Rig(streams)
        rig.compute(0, PAGES, 5)
        is_right = True
        if action == "read":
            is_right = rig.read(index)
        else:
            rig.write(index, 1, host_waits=False)
            if action == "write again":
                rig.compute(2, 9, 4)
                rig.write(index, 2, host_waits=False)
        return rig.is_right() and is_right

    assert all(run(DeferredStreams(random.Random(seed))) for seed in range(20))
    assert not all(run(careless(random.Random(seed))) for seed in range(20))


def in_threads(*work: Callable[[], None]) -> None:
    """All at once. Nobody may wait for ever, and nobody may fail."""
    failures: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it waits for a buffer that never comes"
    assert not failures, failures


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_threads_share_few_buffers(num_slots: int) -> None:
    rig = Rig(DeferredStreams(random.Random(num_slots)), num_slots=num_slots, slot_pages=2)

    def copy(first: int) -> None:
        index = torch.arange(first, first + 8).flip(0)
        for count in range(15):
            source = torch.full((8, WORDS), 100 * first + count)
            copied = rig.copies.write(index, source, None)
            copied.synchronize()
            target = torch.empty_like(source)
            rig.copies.read(index, target, None)
            assert torch.equal(target, source)

    in_threads(lambda: copy(0), lambda: copy(8), lambda: copy(16))


class Failing(DeferredStreams):
    """Fails when work number `fails_at` is queued."""

    fails_at: int | None = None

    def queue(self, stream: object, work: Callable[[], object]) -> None:
        if self.fails_at is not None:
            self.fails_at -= 1
            if self.fails_at < 0:
                self.fails_at = None
                raise RuntimeError("the device refuses")
        super().queue(stream, work)  # type: ignore[arg-type]


# A copy of four slices: it fails at its wait, or at any of the three operators of a slice.
@pytest.mark.parametrize("fails_at", range(13))
@pytest.mark.parametrize("action", ["read", "write"])
def test_a_copy_that_fails_gives_its_buffers_back(action: str, fails_at: int) -> None:
    streams = Failing(random.Random(fails_at))
    rig = Rig(streams)
    for _ in range(3):  # as many as would use up the buffers
        streams.fails_at = fails_at
        with pytest.raises(RuntimeError, match="refuses"):
            getattr(rig, action)(list(range(12)), *([7] if action == "write" else []))
    in_threads(lambda: rig.write(list(range(PAGES)), 3))
    assert rig.read(list(range(PAGES)))
    assert rig.is_right()


class Lazy(random.Random):
    """The device does nothing that nobody waits for."""

    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize("fails_at", range(13))
def test_nothing_arrives_in_pages_once_a_write_has_failed(fails_at: int) -> None:
    streams = Failing(Lazy(0))
    rig = Rig(streams)
    streams.fails_at = fails_at
    with pytest.raises(RuntimeError, match="refuses"):
        rig.write(list(range(12)), 7)
    rig.pages[:12] = rig.expected[:12] = 4  # whoever has them now
    rig.write(list(range(12, PAGES)), 8)
    assert rig.is_right()


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("num_rows", [1, 4, 10])
def test_rows_that_do_not_fit_are_refused(action: str, num_rows: int) -> None:
    rig = Rig(DeferredStreams(random.Random(0)))
    with pytest.raises(ValueError, match=f"{num_rows} rows were given for 9 pages"):
        getattr(rig.copies, action)(torch.arange(9), torch.zeros(num_rows, WORDS, dtype=torch.int64), None)
    assert rig.is_right()


def test_a_page_larger_than_a_buffer_has_one_to_itself() -> None:
    rig = Rig(DeferredStreams(random.Random(0)), slot_pages=0)
    rig.write([5, 2, 9], 1)
    assert rig.read([2, 9, 5])


def test_what_a_device_does_badly_is_refused() -> None:
    streams = DeferredStreams(random.Random(0))
    side = streams.side_stream()
    pinned, mine = streams.pinned_bytes(8), side.device_bytes(8)
    other, ordinary = streams.side_stream().device_bytes(8), torch.zeros(8, dtype=torch.uint8)
    index = torch.zeros(8, dtype=torch.int64)
    for work, words in (
        (lambda: mine.copy_(pinned), "give non_blocking"),
        (lambda: mine.copy_(ordinary, non_blocking=True), "neither pinned nor kept"),
        (lambda: mine.copy_(other, non_blocking=True), "neither pinned nor kept"),
        (lambda: mine.add_(pinned), "memory of the host"),
        (lambda: mine + 1, "takes memory within a stream"),
        (lambda: torch.index_select(mine, 0, index, out=mine), "neither pinned nor kept"),
    ):
        with side.use(), pytest.raises(RuntimeError, match=words):
            work()
    side.keep(other)
    with side.use():
        mine.copy_(other, non_blocking=True)
