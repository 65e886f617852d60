"""Copies of weights and pages between two engines, and which blocks a copy has to make again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.arena import Arena
from actors.engine.dirty_blocks import DirtyBlocks
from actors.engine.module_transfer import (
    PageChunk,
    TransferError,
    page_chunks,
    read_chunk,
    read_weights,
    write_chunk,
    write_weights,
)
from kv.layout import KvLayout
from tests.engine.conftest import MakeEngine

LANES = [(layer, head) for layer in range(3) for head in range(2)]


def test_weights_arrive_whole_or_not_at_all(llama_folder: Path, make_engine: MakeEngine) -> None:
    source, target = make_engine(llama_folder), make_engine(llama_folder)
    data, checksum = read_weights(source.loaded.layer_memory, 1)
    memory = target.loaded.layer_memory
    target.lanes_departed([], [1])
    with pytest.raises(TransferError, match="waits for no weights"):
        write_weights(memory, 1, data, checksum)
    with pytest.raises(KeyError, match="not here"):
        read_weights(memory, 1)
    assert target.grant("home", [(1, 0)], [1], 4, source.loaded.fingerprint).layers_to_copy == (1,)
    memory.bytes_of(1).fill_(0xFF)
    damaged = data.clone()
    damaged[1000] ^= 1
    for wrong, words in ((damaged, "another checksum"), (data[:-1], "expected are"), (data.view(torch.int8), "int8")):
        with pytest.raises(TransferError, match=words):
            write_weights(memory, 1, wrong, checksum)
        assert 1 not in memory.weights
        assert bool((memory.bytes_of(1) == 0xFF).all())
    write_weights(memory, 1, data, checksum)
    write_weights(memory, 1, data, checksum)  # for another instance, whose copy comes later
    for role, tensor in source.loaded.model.layers[1].items():
        assert torch.equal(memory.weights[1][role], tensor)


def test_pages_arrive_in_their_lanes_and_blocks(llama_folder: Path, make_engine: MakeEngine) -> None:
    source = make_engine(llama_folder, kv_cache_blocks=8)
    target = make_engine(llama_folder, kv_cache_blocks=64)
    target.grant("home", LANES[2:], [], 8, source.loaded.fingerprint)
    here = source.loaded.arena, source.loaded.lanes
    there = target.loaded.arena, target.grants.instances["home"].lanes
    source.loaded.arena.pages.copy_(torch.rand_like(source.loaded.arena.pages))
    untouched = target.loaded.lanes.pages(0).flatten()
    before = target.loaded.arena.pages[untouched].clone()
    for chunk in page_chunks(source.loaded.arena, LANES[2:], [7, 0, 3], 7 * source.loaded.layout.page_bytes):
        data = read_chunk(*here, chunk)
        assert data.is_contiguous()
        write_chunk(*there, chunk, data)
    for (layer, head), block in itertools.product(LANES[2:], [7, 0, 3]):
        pages = [
            arena.pages[table.pages(layer)[table.heads(layer).index(head), block]] for arena, table in (here, there)
        ]
        assert torch.equal(*pages)
    assert torch.equal(target.loaded.arena.pages[untouched], before)


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (PageChunk(((0, 0),), (1,)), "lanes .* are not here"),
        (PageChunk(((2, 0),), (8,)), "blocks 0 to 7"),
        (PageChunk(((2, 0),), (-1,)), "blocks 0 to 7"),
        (PageChunk((), (1,)), "of 0 lanes"),
        (PageChunk(((2, 0),), (1, 2)), "expected torch.float32"),
    ],
)
def test_pages_outside_the_grant_are_refused(
    chunk: PageChunk, words: str, llama_folder: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama_folder, kv_cache_blocks=64)
    engine.grant("home", [(2, 0)], [], 8, engine.loaded.fingerprint)
    arena, table = engine.loaded.arena, engine.grants.instances["home"].lanes
    before = arena.pages.clone()
    with pytest.raises(TransferError, match=words):
        write_chunk(arena, table, chunk, torch.ones(1, 1, *arena.pages.shape[1:]))
    assert torch.equal(arena.pages, before)


@given(
    lanes=st.lists(st.sampled_from(LANES), unique=True, min_size=1),
    blocks=st.lists(st.integers(0, 50), unique=True),
    pages=st.integers(0, 20),
)
def test_chunks_hold_every_page_once_and_are_bounded(
    lanes: list[tuple[int, int]], blocks: list[int], pages: int
) -> None:
    arena = Arena(KvLayout(3, 2, 8, 16, "float32"), 1, 1, torch.device("cpu"))
    chunks = list(page_chunks(arena, lanes, blocks, pages * arena.layout.page_bytes + 1))
    copied = [pair for chunk in chunks for pair in itertools.product(chunk.lanes, chunk.blocks)]
    assert sorted(copied) == sorted(itertools.product(lanes, blocks))
    assert all(len(chunk.lanes) * len(chunk.blocks) <= max(1, pages) for chunk in chunks)


@given(
    st.lists(st.one_of(st.none(), st.sets(st.integers(0, 9)), st.dictionaries(st.integers(5, 9), st.integers(0, 4))))
)
def test_dirty_blocks_are_those_written_after_a_point(events: list[object]) -> None:
    """None takes a point, a set writes, a dictionary moves blocks into a pool of five."""
    dirty, since = DirtyBlocks(), dict[int, set[int]]()
    for event in events:
        if event is None:
            since[dirty.point()] = set()
        elif isinstance(event, dict):
            dirty.relocated(event, 5)
            for point, blocks in since.items():
                since[point] = {block for block in blocks | set(event.values()) if block < 5}
        else:
            assert isinstance(event, set)
            dirty.wrote(event)
            for blocks in since.values():
                blocks |= event
        for point, blocks in since.items():
            assert dirty.since(point) == sorted(blocks)
