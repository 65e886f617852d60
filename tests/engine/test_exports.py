"""Blocks that are copied out while their prompt is still being computed."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from actors.engine.block_manager import BlockManager
from actors.engine.engine import Engine
from actors.engine.exports import EarlyExports
from actors.engine.page_io import read_pages
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine.sequence import SequenceState
from kv.keys import extend_block_keys
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from migrate.waiting_line import Turn
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts

BLOCK = 4


def make_sequence(blocks: BlockManager, num_tokens: int) -> SequenceState:
    request = EngineRequest("r", tuple(range(num_tokens)), SamplingParams(max_tokens=1), hand_over=True)
    extend = functools.partial(extend_block_keys, block_tokens=BLOCK, fingerprint=b"", salt=b"")
    sequence = SequenceState(request, Turn(0.0), extend)
    sequence.block_ids = blocks.allocate(-(-num_tokens // BLOCK))
    return sequence


def test_an_export_holds_all_full_blocks_until_it_ends() -> None:
    blocks = BlockManager(8)
    sequence = make_sequence(blocks, 23)
    early = EarlyExports(blocks, BLOCK, min_blocks=2)
    sequence.num_computed = 11
    export = early.begin(sequence)
    assert export is not None
    assert (export.block_ids, export.num_tokens) == (tuple(sequence.block_ids[:2]), 8)
    assert export.keys == tuple(sequence.keys(BLOCK)[:2])
    assert export.export_id in early
    assert early.content(export.export_id) is export

    blocks.release(sequence.block_ids)  # preempted, aborted or done
    assert blocks.num_live == 2
    assert early.end(export.export_id)
    assert blocks.num_live == len(early) == 0
    assert export.export_id not in early
    assert not early.end(export.export_id)
    with pytest.raises(KeyError):
        early.content(export.export_id)


def test_there_is_one_at_a_time_and_each_brings_enough_that_is_new() -> None:
    blocks = BlockManager(16)
    sequence = make_sequence(blocks, 60)
    early = EarlyExports(blocks, BLOCK, min_blocks=2)
    sequence.num_cached_tokens = 8  # found here or in the store: nobody needs them
    begun = []
    for num_computed, ends_before in ((12, False), (16, False), (24, False), (28, True), (31, True), (44, False)):
        if ends_before:
            early.end(begun[-1].export_id)
        sequence.num_computed = num_computed
        export = early.begin(sequence)
        if export is not None:
            begun.append(export)
    assert [export.num_tokens for export in begun] == [16, 28, 44]
    early.end(begun[-1].export_id)
    blocks.release(sequence.block_ids)
    blocks.check_integrity()
    assert blocks.num_live == 0


def payload(engine: Engine, block_ids: tuple[int, ...]) -> np.ndarray:
    layout = engine.loaded.layout
    part = PartRange(0, len(block_ids), 0, layout.num_layers, 0, layout.num_kv_heads)
    draft = draft_part(PartHeader(layout, b"", part, (b"k",) * len(block_ids), layout.block_tokens))
    read_pages(engine.loaded, part, block_ids, draft.payload)
    return np.array(draft.payload)


def test_a_chunked_prompt_gives_away_what_its_chunks_have_filled(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8, early_export_bytes=1)
    prompt = make_prompt(110, 5)
    engine.add(EngineRequest("long", prompt, greedy(4), hand_over=True))
    engine.add(EngineRequest("stays", make_prompt(90, 6), greedy(4)))
    copies = []
    held: list[str] = []
    num_steps = 0
    while engine.has_work:
        early = [export for export in engine.step().exports if export.export_id != "long"]
        num_steps += 1
        for export in early:
            assert engine.export_content(export.export_id) == export
            copies.append((export, payload(engine, export.block_ids)))
            held.append(export.export_id)
        if num_steps == 2:  # the second one is held until the end
            assert engine.release_export(held[0])
    assert [export.num_tokens for export, _ in copies] == [32, 96]
    final = engine.export_content("long")
    assert final.num_tokens == 110
    for export, copied in copies:
        num_blocks = len(export.block_ids)
        assert export.keys == final.keys[:num_blocks]
        np.testing.assert_array_equal(copied, payload(engine, final.block_ids[:num_blocks]))

    assert engine.release_export("long")
    assert engine.num_live_requests == 1
    assert engine.blocks.num_live == 96 // engine.block_tokens
    assert engine.holds_export(held[1])
    assert engine.release_export(held[1])
    engine.check_idle()
    assert engine.blocks.num_live == 0


def test_an_answer_gives_its_prompt_away_and_at_its_end_only_what_is_new(
    llama_folder: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8, early_export_bytes=1)
    block = engine.block_tokens
    engine.add(EngineRequest("short", make_prompt(2 * block, 5), greedy(4), publish_beyond_blocks=0))
    engine.add(EngineRequest("long", make_prompt(2 * block + 1, 6), greedy(block), publish_beyond_blocks=0))
    exports = []
    while engine.has_work:
        for export in engine.step().exports:
            exports.append((export.export_id, export.num_tokens // block))
            assert engine.release_export(export.export_id)
    early = [(name.partition("@")[0], blocks) for name, blocks in exports if "@" in name]
    assert dict(early) == {"short": 2, "long": 2}  # the last of each
    assert [(name, blocks) for name, blocks in exports if "@" not in name] == [("long", 3)]
    engine.check_idle()
    assert engine.blocks.num_live == 0


def test_an_abort_leaves_what_is_being_copied(llama_folder: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8, early_export_bytes=1)
    prompt = make_prompt(110, 5)
    expected = run_prompts(make_engine(llama_folder), [prompt], greedy(3))
    engine.add(EngineRequest("long", prompt, greedy(4), hand_over=True))
    (export,) = engine.step().exports
    before = payload(engine, export.block_ids)
    assert engine.abort("long")
    assert run_prompts(engine, [prompt], greedy(3)) == expected
    np.testing.assert_array_equal(payload(engine, export.block_ids), before)
    assert engine.release_export(export.export_id)
    engine.check_idle()


def test_prompts_that_nobody_asks_for_or_that_are_short_give_nothing(
    llama_folder: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8)  # 4 MiB are more than all of it
    engine.add(EngineRequest("long", make_prompt(110, 5), greedy(1), hand_over=True))
    exports = [export.export_id for _ in range(8) for export in engine.step().exports]
    assert exports == ["long"]
    other = make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8, early_export_bytes=1)
    other.add(EngineRequest("kept", make_prompt(110, 5), greedy(1)))
    assert [export for _ in range(8) for export in other.step().exports] == []
