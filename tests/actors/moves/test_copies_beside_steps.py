"""Pages and weights of a hosted instance are copied while its host is in a step, and only where they may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from actors.engine.module_transfer import PageChunk, read_weights
from actors.moves.instance_home import QuestionFailedError
from actors.moves.questions import Kind, encode, encode_chunk
from migrate.links.calls import Answer
from migrate.moves import LayerMove
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join, moves_of
from tests.actors.moves.unnoticed import PROMPTS
from tests.engine_driver import greedy
from tests.link_ends import WAIT_S
from tests.reference import assert_greedy, load_reference

OUT = LayerMove("home", 2, 1, "home", "host")
CHUNK = PageChunk(((2, 0), (2, 1)), (3, 5))


@pytest.fixture
def pair(make_worker: MakeWorker) -> tuple[LinkedWorker, LinkedWorker]:
    """A home, and the worker that has its last layer."""
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    asyncio.run(moves_of(home).make(OUT))
    return home, host


def ask(home: LinkedWorker, kind: Kind, meta: bytes, *tensors: torch.Tensor) -> Answer:
    return asyncio.run(home.home.ask("host", kind, meta, tensors))


@contextmanager
def in_a_step(worker: LinkedWorker) -> Iterator[None]:
    """The engine's thread does something else as long as this lasts."""
    has_begun, may_end = threading.Event(), threading.Event()

    def step(_: object) -> None:
        has_begun.set()
        assert may_end.wait(WAIT_S)

    ended: Future[None] = worker.thread.call(step)
    assert has_begun.wait(WAIT_S)
    try:
        yield
    finally:
        may_end.set()
        ended.result(WAIT_S)


def pages(worker: LinkedWorker) -> torch.Tensor:
    return torch.randn(2, 2, *worker.engine.loaded.arena.pages.shape[1:])


def test_nothing_that_is_copied_waits_for_a_step_of_the_hosts(pair: tuple[LinkedWorker, LinkedWorker]) -> None:
    home, host = pair
    data = pages(home)
    with in_a_step(host):
        ask(home, Kind.WRITE_PAGES, encode_chunk(CHUNK), data)
        assert torch.equal(ask(home, Kind.READ_PAGES, encode_chunk(CHUNK)).tensors[0], data)
        (weights,) = ask(home, Kind.READ_WEIGHTS, encode(layer=2)).tensors
        assert len(weights) == home.engine.loaded.layer_memory.packed_bytes(2)


def test_nothing_that_is_copied_waits_for_a_step_at_home(pair: tuple[LinkedWorker, LinkedWorker]) -> None:
    home, _ = pair
    loaded = home.engine.loaded
    expected = loaded.arena.pages[loaded.lanes.pages(1)[:, [3, 5]]]
    with in_a_step(home):
        assert torch.equal(home.home.grants.read_own(PageChunk(((1, 0), (1, 1)), (3, 5))), expected)
        data, _ = home.home.grants.read_own_weights(1)
        assert len(data) == loaded.layer_memory.packed_bytes(1)


def test_what_was_given_back_is_not_written_to(pair: tuple[LinkedWorker, LinkedWorker]) -> None:
    """Whoever gives a move up may have copies on their way: they find that nothing is theirs any more."""
    home, host = pair
    before = host.engine.loaded.arena.pages.clone()
    weights, checksum = read_weights(host.engine.loaded.layer_memory, 1)
    with pytest.raises(QuestionFailedError, match="layer 1 was not granted; granted are"):
        ask(home, Kind.WRITE_WEIGHTS, encode(layer=1, checksum=checksum.hex()), weights)
    elsewhere = PageChunk(((1, 0), (1, 1)), (3, 5))
    with pytest.raises(QuestionFailedError, match=r"lanes .* are not here"):
        ask(home, Kind.WRITE_PAGES, encode_chunk(elsewhere), pages(home))
    ask(home, Kind.RELEASE, encode(lanes=[(2, 0), (2, 1)], layers=[2]))
    with pytest.raises(QuestionFailedError, match="nothing of instance 'home' is hosted here"):
        ask(home, Kind.WRITE_PAGES, encode_chunk(CHUNK), pages(home))
    assert torch.equal(host.engine.loaded.arena.pages, before)


@pytest.mark.parametrize("drops_cached", [False, True])
def test_kv_that_no_request_refers_to_stays_behind_where_the_store_has_it(
    drops_cached: bool, make_worker: MakeWorker, family_folder: Callable[[str], Path]
) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    home.start(PROMPTS, greedy(4))
    home.wait()
    cached = home.engine.blocks.num_cached
    assert cached > 0
    moves = moves_of(home, drops_cached=drops_cached)
    for move in (OUT, LayerMove("home", 2, 1, "host", "home")):
        report = asyncio.run(moves.make(move))
        lanes = home.engine.loaded.spec.num_kv_heads
        assert report.kv_bytes == (0 if drops_cached else cached * lanes * home.engine.loaded.layout.page_bytes)
    assert home.engine.blocks.num_cached == (0 if drops_cached else cached)
    home.start(PROMPTS, greedy(4))
    answers = home.wait()
    assert_greedy(load_reference(family_folder("llama")), PROMPTS, answers[: len(PROMPTS)])
    assert answers[len(PROMPTS) :] == answers[: len(PROMPTS)]
    assert (home.engine.counters.cached_prompt_tokens == 0) == drops_cached
