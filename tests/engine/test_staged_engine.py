"""Engines whose pages are copied through staging, over a device that copies only what somebody waits for.

Their steps compute at once, on the CPU. So a layer that is computed before its copies finds other numbers.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.engine.device_event import DeviceEvent
from actors.engine.engine import Engine
from actors.engine.exports import Export
from actors.engine.layer_arrival import LayerArrival
from actors.engine.page_io import read_pages, write_pages
from actors.engine.request import EngineRequest
from actors.engine.scheduler import Fetch
from actors.engine.staging import StagedCopies
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from load_tests.deferred_streams import DeferredStreams
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts

BLOCK = 16
PROMPT = make_prompt(70, 3)


class Lazy(random.Random):
    """The device does nothing that nobody waits for."""

    def random(self) -> float:
        return 1.0


def staged(engine: Engine) -> Engine:
    """The same model in an engine with small staging buffers."""
    pages = engine.loaded.arena.page_words
    copies = StagedCopies(pages, DeferredStreams(Lazy()), num_slots=2, slot_bytes=7 * engine.loaded.layout.page_bytes)
    return Engine(replace(engine.loaded, copies=copies), engine.config)


def payload_of(engine: Engine, export: Export, layer: int) -> np.ndarray:
    """One layer of an export's blocks."""
    layout = engine.loaded.layout
    part = PartRange(0, len(export.block_ids), layer, 1, 0, layout.num_kv_heads)
    draft = draft_part(PartHeader(layout, b"", part, (b"k",) * part.num_blocks, BLOCK))
    read_pages(engine.loaded, part, export.block_ids, draft.payload, export.mark)
    return np.array(draft.payload)


def write_layer(engine: Engine, fetch: Fetch, layer: int, payload: np.ndarray) -> DeviceEvent | None:
    part = PartRange(0, len(payload), layer, 1, 0, engine.loaded.layout.num_kv_heads)
    block_ids = fetch.sequence.block_ids[: len(payload)]
    return write_pages(engine.loaded, part, block_ids, payload, fetch.sequence.mark)


def layers_of(engine: Engine) -> tuple[int, list[np.ndarray]]:
    """PROMPT's KV, by layer, and its first token."""
    engine.add(EngineRequest("source", PROMPT, greedy(1), hand_over=True))
    events = [event for _ in iter(lambda: engine.has_work, False) for event in engine.step().events]
    (token,) = [event.token_id for event in events if event.token_id is not None]
    export = engine.export_content("source")
    return token, [payload_of(engine, export, layer) for layer in range(engine.loaded.layout.num_layers)]


@pytest.mark.parametrize("is_early", [False, True], ids=["whole", "layer by layer"])
def test_a_prompt_handed_over_through_staging_goes_on_as_if_it_had_stayed(
    is_early: bool, llama_folder: Path, make_engine: MakeEngine
) -> None:
    (expected,) = run_prompts(make_engine(llama_folder), [PROMPT], greedy(8))
    token, layers = layers_of(staged(make_engine(llama_folder)))
    engine = staged(make_engine(llama_folder))
    engine.add(EngineRequest("r", PROMPT, greedy(8), output_token_ids=(token,), external_tokens=len(PROMPT)))
    (fetch,) = engine.step().fetches
    fetching = threading.Event()
    incoming = LayerArrival(timeout_s=60.0)

    def bring() -> None:
        for layer, payload in enumerate(layers):
            assert fetching.wait(30)
            incoming.advance(layer + 1, write_layer(engine, fetch, layer, payload))

    if is_early:
        thread = threading.Thread(target=bring)
        thread.start()
        assert engine.arriving("r", len(PROMPT), incoming)
        fetching.set()
        tokens = [event.token_id for event in engine.step().events]
        thread.join()
    else:
        fetching.set()
        copied = [write_layer(engine, fetch, layer, payload) for layer, payload in enumerate(layers)]
        assert copied[-1] is not None
        copied[-1].synchronize()
        assert engine.fetched("r", len(PROMPT))
        tokens = []
    while engine.has_work:
        tokens += [event.token_id for event in engine.step().events]
    assert [token, *tokens] == expected
    assert engine.counters.fetched_tokens == len(PROMPT)
    assert engine.counters.computed_prompt_tokens == 0
    engine.check_idle()


def test_marks_are_those_of_the_steps_that_used_the_blocks(llama_folder: Path, make_engine: MakeEngine) -> None:
    """Not of a later one: the host may be several chunks ahead of the device, and a copy would wait for all of them."""
    engine = staged(make_engine(llama_folder, max_batch_tokens=32, max_running_requests=8, early_export_bytes=1))
    copies = engine.loaded.copies
    engine.add(EngineRequest("long", make_prompt(110, 5), greedy(1), hand_over=True))
    marks = [copies.mark]
    exports = []
    while engine.has_work:
        for export in engine.step().exports:
            exports.append(export)
            assert export.mark is copies.mark
            if export.export_id != "long":
                engine.release_export(export.export_id)
        marks.append(copies.mark)
        assert marks[-1] is not marks[-2]
    assert [marks.index(export.mark) for export in exports] == [1, 2, 3, 4]

    engine.add(EngineRequest("other", make_prompt(20, 6), greedy(1)))
    engine.add(EngineRequest("late", PROMPT, greedy(1), external_tokens=64))
    (fetch,) = engine.step().fetches
    assert fetch.sequence.mark is marks[-1]
    assert copies.mark is not marks[-1]
    assert engine.export_content("long").mark is exports[-1].mark


def test_a_step_that_fails_leaves_a_mark_behind_what_it_gave_the_device(
    llama_folder: Path, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests' blocks are free then, and the next fetch into them must wait."""
    engine = staged(make_engine(llama_folder))
    engine.add(EngineRequest("r", PROMPT, greedy(1)))
    before = engine.loaded.copies.mark

    def forward(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.loaded.model, "forward_sampled", forward)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.fail_all("broken")
    monkeypatch.undo()
    after = engine.loaded.copies.mark
    assert after is not before
    engine.add(EngineRequest("late", PROMPT, greedy(1), external_tokens=64))
    (fetch,) = engine.step().fetches
    assert fetch.sequence.mark is after


class Waited:
    """An event that tells which one was waited for."""

    def __init__(self, name: str, waits: list[str]) -> None:
        self.name, self.waits = name, waits

    def wait(self) -> None:
        self.waits.append(self.name)

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def test_computing_waits_for_the_copies_of_the_layers_it_needs_and_no_others() -> None:
    waits: list[str] = []
    incoming = LayerArrival(timeout_s=60.0)
    for num_layers, name in ((0, "half of 0"), (1, "rest of 0"), (1, "half of 1 and 2"), (3, "rest of 1 and 2")):
        incoming.advance(num_layers, Waited(name, waits))
    incoming.wait(1)
    assert waits == ["half of 0", "rest of 0"]
    incoming.wait(1)
    incoming.wait(2)
    assert waits == ["half of 0", "rest of 0", "half of 1 and 2", "rest of 1 and 2"]
    incoming.wait(3)
    assert len(waits) == 4
    incoming.advance(4, Waited("3", waits))
    incoming.wait(4)
    assert waits[4:] == ["3"]
