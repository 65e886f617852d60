"""The pages of parts, wherever their lanes lie: which are whose, and that they get there and back."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.module_transfer import PageChunk, read_chunk
from actors.engine.staging import StagedCopies
from actors.kv_pages import PagesUnavailableError
from actors.moves import placed_pages
from actors.moves.page_links import PageLinks
from actors.moves.placed_pages import PlacedPages, pieces_on
from actors.moves.questions import Kind
from kv.part_range import PartRange
from load_tests.deferred_streams import DeferredStreams
from migrate.links.calls import LinkCalls
from migrate.links.memory_network import MemoryNetwork
from migrate.moves import LayerMove
from migrate.placement import Placement
from tests.actors.moves.conftest import MakeWorker
from tests.actors.moves.linked_worker import LinkedWorker, join, moves_of
from tests.actors.moves.test_work_links import put_last_layers
from tests.link_ends import WAIT_S

LAYERS, HEADS = 5, 4


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """What some moves make of an instance that was all at home."""
    placement = Placement.at_home("home", LAYERS, HEADS)
    for _ in range(draw(st.integers(0, 4))):
        worker = draw(st.sampled_from(["home", "x", "y"]))
        first, stop = sorted(draw(st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS))))
        heads = sorted(draw(st.tuples(st.integers(0, HEADS), st.integers(0, HEADS))))
        try:
            if draw(st.booleans()):
                placement = placement.with_layers_moved(first, stop - first, worker)
            else:
                placement = placement.with_heads_moved(range(first, stop), range(*heads), worker)
        except ValueError:
            continue
    return placement


@st.composite
def parts(draw: st.DrawFn, layers: int = LAYERS, heads: int = HEADS, blocks: int = 1) -> PartRange:
    ranges = []
    for most in (blocks, layers, heads):
        first = draw(st.integers(0, most - 1))
        ranges += [first, draw(st.integers(1, most - first))]
    return PartRange(*ranges)


def lanes_in(part: PartRange) -> list[tuple[int, int]]:
    return [
        (layer, head)
        for layer in range(part.first_layer, part.first_layer + part.num_layers)
        for head in range(part.first_head, part.first_head + part.num_heads)
    ]


@given(placement=placements(), part=parts())
def test_each_lane_of_a_part_is_in_one_piece_of_the_worker_that_has_it(placement: Placement, part: PartRange) -> None:
    for worker in ("home", "x", "y"):
        pieces = list(pieces_on(worker, placement, part))
        assert all((piece.first_block, piece.num_blocks) == (part.first_block, part.num_blocks) for piece in pieces)
        lanes = [lane for piece in pieces for lane in lanes_in(piece)]
        assert sorted(lanes) == [lane for lane in lanes_in(part) if lane in placement.lanes_on(worker)]


def whole(worker: LinkedWorker) -> PartRange:
    layout = worker.engine.loaded.layout
    return PartRange(0, worker.engine.blocks.num_blocks, 0, layout.num_layers, 0, layout.num_kv_heads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pages_each", [1, 3, 1000])
def test_what_is_written_is_where_it_belongs_and_is_read_again(
    dtype: str, pages_each: int, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 at home, 1 and 2 each on another worker; parts of any layers and heads, in few or many questions."""
    home = make_worker("home", dtype=dtype, kv_cache_blocks=16)
    hosts = [make_worker(name, dtype=dtype, kv_cache_blocks=64) for name in ("x", "y")]
    loaded, rng = home.engine.loaded, np.random.default_rng(pages_each)
    monkeypatch.setattr(placed_pages, "_CHUNK_BYTES", pages_each * loaded.layout.page_bytes)
    moves = moves_of(home)
    for layer, host in enumerate(hosts, start=1):
        join(home, host)
        asyncio.run(moves.make(LayerMove("home", layer, 1, "home", host.name)))
    pages = PlacedPages(home.engine, PageLinks(home.calls), WAIT_S)
    everything, all_blocks = whole(home), list(range(home.engine.blocks.num_blocks))
    expected = np.zeros(everything.shape(loaded.layout), np.float32 if dtype == "float32" else np.int16)
    pages.write(everything, all_blocks, expected)
    for _ in range(20):
        firsts = rng.integers([3, 2])
        counts = [rng.integers(1, most - first + 1) for first, most in zip(firsts, (3, 2), strict=True)]
        blocks = [int(block) for block in rng.permutation(all_blocks)[: rng.integers(1, 9)]]
        part = PartRange(5, len(blocks), int(firsts[0]), int(counts[0]), int(firsts[1]), int(counts[1]))
        payload = rng.integers(-99, 99, part.shape(loaded.layout)).astype(expected.dtype)
        payload.flags.writeable = False  # as in an object store
        pages.write(part, blocks, payload)
        layers, heads = np.array(lanes_in(part)).T.reshape(2, 1, part.num_layers, part.num_heads)
        expected[np.array(blocks)[:, None, None], layers, heads] = payload
        again = np.empty_like(payload)
        pages.read(part, [*[99] * 5, *blocks], again)
        np.testing.assert_array_equal(again, payload)
    got = np.empty_like(expected)
    pages.read(everything, all_blocks, got)
    np.testing.assert_array_equal(got, expected)
    for layer, host in enumerate(hosts, start=1):
        chunk = PageChunk(((layer, 0), (layer, 1)), tuple(all_blocks))
        theirs = host.engine.grants.instances["home"].lanes
        data = read_chunk(host.engine.loaded.arena, theirs, chunk).view(torch.from_numpy(got).dtype)
        np.testing.assert_array_equal(data.numpy(), expected[:, layer].swapaxes(0, 1))


def read_all(worker: LinkedWorker, timeout_s: float) -> None:
    pages = PlacedPages(worker.engine, PageLinks(worker.calls), timeout_s)
    part = whole(worker)
    pages.read(part, range(part.num_blocks), np.empty(part.shape(worker.engine.loaded.layout), np.float32))


def test_nobody_waits_for_ever(make_worker: MakeWorker, network: MemoryNetwork) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    put_last_layers(home, host, 1)
    read_all(home, WAIT_S)
    network.faults("host", "home").hold()
    with pytest.raises(PagesUnavailableError, match="did not answer in time"):
        read_all(home, 0.01)
    network.faults("host", "home").release()
    home.thread.hold_steps().result(WAIT_S)
    with pytest.raises(PagesUnavailableError, match="lanes were being moved for longer"):
        read_all(home, 0.01)
    home.thread.resume_steps()
    read_all(home, WAIT_S)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((), "it sent 0 tensors"),
        ((torch.zeros(3),), r"came from 'host' as torch.float32 \[3\]; expected torch.float32 \[2, 96, 2, 16, 8\]"),
    ],
)
def test_an_answer_that_is_something_else_is_none(
    tensors: tuple[torch.Tensor, ...], words: str, make_worker: MakeWorker, network: MemoryNetwork
) -> None:
    home = make_worker("home")
    host = LinkCalls("host", network.connector("host"), lambda question: question.answer(b"", tensors), print)
    for future in (home.calls.connect("host", 0), host.connect("home", 0)):
        future.result(WAIT_S)
    placement = home.at_home.with_layers_moved(2, 1, "host")
    home.thread.call_drained(lambda engine: engine.use_placement(placement, home.stages)).result(WAIT_S)
    with pytest.raises(PagesUnavailableError, match=words):
        read_all(home, WAIT_S)
    host.close(WAIT_S)


@pytest.mark.parametrize("kind", [Kind.READ_PAGES, Kind.WRITE_PAGES])
def test_a_question_of_an_older_placement_is_refused(kind: Kind, make_worker: MakeWorker) -> None:
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    put_last_layers(home, host, 1)
    links, chunk, until_s = PageLinks(home.calls), PageChunk(((2, 0),), (3,)), time.monotonic() + WAIT_S
    data = links.read("host", 1, chunk, until_s).result(WAIT_S)

    def ask(version: int) -> None:
        answer: Future[Any] = (
            links.read("host", version, chunk, until_s)
            if kind is Kind.READ_PAGES
            else links.write("host", version, chunk, data)
        )
        answer.result(WAIT_S)

    ask(2)  # it was told of version 1, and this one leaves it what it has
    with pytest.raises(PagesUnavailableError, match="placement version 0; here it is 1"):
        ask(0)


class Lazy(random.Random):
    """The device does nothing that nobody waits for."""

    def random(self) -> float:
        return 1.0


@pytest.mark.parametrize("is_divided", [False, True])
def test_pages_are_filled_when_a_write_returns(is_divided: bool, make_worker: MakeWorker) -> None:
    """On a device that copies later than it is told to, too: a move may read them next."""
    home, host = make_worker("home"), make_worker("host")
    join(home, host)
    if is_divided:
        put_last_layers(home, host, 1)
    engine, words = home.engine, home.engine.loaded.arena.page_words
    staged = StagedCopies(words, DeferredStreams(Lazy()), num_slots=2, slot_bytes=3 * engine.loaded.layout.page_bytes)
    engine.loaded = replace(engine.loaded, copies=staged)
    part = replace(whole(home), num_blocks=2)
    pages = PlacedPages(engine, PageLinks(home.calls), WAIT_S)
    pages.write(part, [4, 9], np.full(part.shape(engine.loaded.layout), 7.0, np.float32))
    lanes = engine.loaded.lanes
    for layer in range(part.num_layers - is_divided):
        assert (engine.loaded.arena.pages[lanes.pages(layer)[:, [4, 9]]] == 7.0).all()
