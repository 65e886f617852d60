"""Computing a request while its prefix still arrives, layer by layer."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from actors.engine.engine import Engine
from actors.engine.layer_arrival import LayerArrival
from actors.engine.page_io import read_pages, write_pages
from actors.engine.request import EngineRequest, TokenEvent
from actors.engine.step_plan import Fetch
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from tests.engine.conftest import MakeEngine
from tests.engine_driver import greedy, make_prompt, run_prompts

BLOCK = 16
PROMPT = make_prompt(70, 3)
PREFIX_TOKENS = 64
OTHER = make_prompt(30, 9)


class Source:
    """Has the KV of PROMPT's prefix, as another worker computed it, and brings it in layer by layer."""

    def __init__(self, engine: Engine, tokens: tuple[int, ...] = PROMPT) -> None:
        engine.add(EngineRequest("source", tokens, greedy(1), hand_over=True))
        while engine.has_work:
            engine.step()
        block_ids = engine.export_content("source").block_ids
        self.num_layers = engine.loaded.layout.num_layers
        self.layers = []
        for layer in range(self.num_layers):
            part = self.part(engine, layer)
            keys = (b"k",) * part.num_blocks
            payload = draft_part(PartHeader(engine.loaded.layout, b"", part, keys, BLOCK)).payload
            read_pages(engine.loaded, part, block_ids[: part.num_blocks], payload)
            self.layers.append(np.array(payload))

    def part(self, engine: Engine, layer: int) -> PartRange:
        return PartRange(0, PREFIX_TOKENS // BLOCK, layer, 1, 0, engine.loaded.layout.num_kv_heads)

    def bring(self, engine: Engine, fetch: Fetch, layer: int) -> None:
        skipped = fetch.first_token // BLOCK
        part = self.part(engine, layer)
        wanted = PartRange(skipped, part.num_blocks - skipped, layer, 1, 0, part.num_heads)
        block_ids = fetch.sequence.block_ids[skipped : part.num_blocks]
        write_pages(engine.loaded, wanted, block_ids, self.layers[layer][skipped:])


@pytest.fixture
def source(llama_folder: Path, make_engine: MakeEngine) -> Source:
    return Source(make_engine(llama_folder))


@pytest.fixture
def engine(llama_folder: Path, make_engine: MakeEngine) -> Engine:
    return make_engine(llama_folder)


@pytest.fixture
def expected(llama_folder: Path, make_engine: MakeEngine) -> dict[str, list[int]]:
    prompts = {"late": PROMPT, "other": OTHER}
    return {name: run_prompts(make_engine(llama_folder), [prompt], greedy(6))[0] for name, prompt in prompts.items()}


def start(engine: Engine, *, with_other: bool = False) -> Fetch:
    """A request whose prefix is to be fetched, and perhaps one beside it that computes."""
    engine.add(EngineRequest("late", PROMPT, greedy(6), external_tokens=PREFIX_TOKENS))
    (fetch,) = engine.step().fetches
    if with_other:
        engine.add(EngineRequest("other", OTHER, greedy(6)))
    return fetch


def run(engine: Engine) -> tuple[dict[str, list[int]], list[TokenEvent]]:
    """All answers from here on."""
    answers: dict[str, list[int]] = {}
    events = []
    while engine.has_work:
        for event in engine.step().events:
            events.append(event)
            if event.token_id is not None:
                answers.setdefault(event.request_id, []).append(event.token_id)
    return answers, events


class Fetcher(threading.Thread):
    """Brings the first `num_layers` layers in, and fails if these are not all."""

    def __init__(self, engine: Engine, source: Source, fetch: Fetch, incoming: LayerArrival, num_layers: int) -> None:
        super().__init__()
        self.arguments = engine, source, fetch, incoming, num_layers

    def run(self) -> None:
        engine, source, fetch, incoming, num_layers = self.arguments
        for layer in range(num_layers):
            source.bring(engine, fetch, layer)
            incoming.advance(layer + 1)
        if num_layers < source.num_layers:
            incoming.fail()


@pytest.mark.parametrize("with_other", [False, True], ids=["alone", "beside another"])
def test_a_request_is_computed_while_its_layers_arrive(
    with_other: bool, engine: Engine, source: Source, expected: dict[str, list[int]]
) -> None:
    fetch = start(engine, with_other=with_other)
    incoming = LayerArrival(timeout_s=60.0)
    assert engine.arriving("late", PREFIX_TOKENS, incoming)
    fetcher = Fetcher(engine, source, fetch, incoming, source.num_layers)
    plain_forward = engine.loaded.model.forward_sampled

    def forward(*arguments: object) -> object:
        fetcher.start()  # nothing is there before the step has begun
        engine.loaded.model.forward_sampled = plain_forward  # type: ignore[method-assign]
        return plain_forward(*arguments)  # type: ignore[arg-type]

    engine.loaded.model.forward_sampled = forward  # type: ignore[method-assign,assignment]
    answers, events = run(engine)
    fetcher.join()
    assert answers == {name: tokens for name, tokens in expected.items() if with_other or name == "late"}
    assert not engine.fetched("late", PREFIX_TOKENS)
    assert engine.counters.fetched_tokens == PREFIX_TOKENS
    assert engine.counters.computed_prompt_tokens == len(PROMPT) - PREFIX_TOKENS + with_other * len(OTHER)
    (first,) = [event for event in events if event.request_id == "late" and event.cached_tokens is not None]
    assert first.cached_tokens == PREFIX_TOKENS
    assert engine.counters.cached_prompt_tokens == PREFIX_TOKENS
    assert engine.counters.device_hit_tokens == 0
    engine.check_idle()


@pytest.mark.parametrize("arrived", [0, 2], ids=["at once", "after some layers"])
@pytest.mark.parametrize("usable_tokens", [0, 32])
def test_what_was_computed_from_layers_that_fail_is_void(
    arrived: int, usable_tokens: int, engine: Engine, source: Source, expected: dict[str, list[int]]
) -> None:
    fetch = start(engine, with_other=True)
    incoming = LayerArrival(timeout_s=60.0)
    assert engine.arriving("late", PREFIX_TOKENS, incoming)
    Fetcher(engine, source, fetch, incoming, arrived).start()
    events = engine.step().events
    assert [event.request_id for event in events] == ["other"]
    assert list(engine.scheduler.fetching) == ["late"]
    # The fetch ends with so much of the prefix whole.
    for layer in range(source.num_layers):
        source.bring(engine, fetch, layer)
    assert engine.fetched("late", usable_tokens)
    answers, _ = run(engine)
    assert {"late": answers["late"], "other": [events[0].token_id, *answers["other"]]} == expected
    assert engine.counters.fetched_tokens == usable_tokens
    engine.check_idle()


def test_a_step_gives_up_on_layers_that_never_come(engine: Engine) -> None:
    start(engine)
    assert engine.arriving("late", PREFIX_TOKENS, LayerArrival(timeout_s=0.01))
    assert engine.step().events == []
    assert list(engine.scheduler.fetching) == ["late"]


def test_a_fetch_that_fails_before_its_step_is_a_shorter_prefix(
    engine: Engine, source: Source, expected: dict[str, list[int]]
) -> None:
    fetch = start(engine)
    incoming = LayerArrival(timeout_s=60.0)
    assert engine.arriving("late", PREFIX_TOKENS, incoming)
    for layer in range(source.num_layers):
        source.bring(engine, fetch, layer)
    incoming.fail()
    assert engine.fetched("late", 48)
    assert run(engine)[0] == {"late": expected["late"]}
    assert engine.counters.fetched_tokens == 48


def test_blocks_are_found_by_others_only_when_all_layers_are_there(
    engine: Engine, source: Source, expected: dict[str, list[int]]
) -> None:
    fetch = start(engine)
    incoming = LayerArrival(timeout_s=0.01)
    assert engine.arriving("late", PREFIX_TOKENS, incoming)
    engine.add(EngineRequest("twin", PROMPT, greedy(6)))
    engine.step()  # gives up on the layers; the twin found nothing and computes for itself
    assert engine.counters.computed_prompt_tokens == len(PROMPT)
    for layer in range(source.num_layers):
        source.bring(engine, fetch, layer)
    assert engine.fetched("late", PREFIX_TOKENS)
    answers, _ = run(engine)
    assert answers["late"] == expected["late"]


def test_a_broken_step_does_not_free_blocks_that_layers_arrive_in(
    engine: Engine, source: Source, expected: dict[str, list[int]]
) -> None:
    fetch = start(engine)
    assert engine.arriving("late", PREFIX_TOKENS, LayerArrival(timeout_s=60.0))
    held = list(fetch.sequence.block_ids)
    assert engine.fail_all("broken").events == []
    assert fetch.sequence.block_ids == held
    for layer in range(source.num_layers):
        source.bring(engine, fetch, layer)
    assert engine.fetched("late", PREFIX_TOKENS)
    assert run(engine)[0] == {"late": expected["late"]}


def test_blocks_that_layers_arrive_in_are_never_preempted(llama_folder: Path, make_engine: MakeEngine) -> None:
    """The later arrival would be the victim, were it not for its layers."""
    engine = make_engine(llama_folder, kv_cache_blocks=8)
    engine.add(EngineRequest("early", make_prompt(31, 5), greedy(30)))
    engine.step()
    engine.add(EngineRequest("late", PROMPT[:50], greedy(2), external_tokens=48))
    (fetch,) = engine.step().fetches
    held = list(fetch.sequence.block_ids)
    incoming = LayerArrival(timeout_s=0.01)
    for _ in range(40):
        if not engine.scheduler.fetching:
            break
        assert engine.arriving("late", 48, incoming)
        engine.step()
        assert fetch.sequence.block_ids == held
    assert fetch.sequence.block_ids == held


def test_waiting_is_told_and_bounded() -> None:
    incoming = LayerArrival(timeout_s=0.02)
    incoming.advance(2)
    incoming.wait(2)
    assert (incoming.waited_s, incoming.has_failed) == (0.0, False)
    incoming.wait(3)
    assert incoming.has_failed
    assert incoming.waited_s >= 0.02
    incoming.wait(4)  # at once
