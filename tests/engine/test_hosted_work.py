"""What a host refuses to do for an instance: as an answer, without an exception, and without touching memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.engine.batch import PackedStep
from actors.engine.head_work import HeadWork
from actors.engine.request import EngineRequest
from actors.engine.stage_work import StageWork
from tests.engine.conftest import MakeEngine
from tests.engine.two_workers import HOME, HOST, TwoWorkers
from tests.engine_driver import greedy, make_prompt, run_prompts
from tests.reference import assert_greedy, load_reference


@pytest.fixture
def pair(llama_folder: Path, make_engine: MakeEngine) -> TwoWorkers:
    """Layer 2 on the host, and head 1 of layer 0; some steps have been run."""
    pair = TwoWorkers(make_engine(llama_folder, kv_cache_blocks=8), make_engine(llama_folder, kv_cache_blocks=64))
    pair.move(pair.place.with_heads_moved([0], [1], HOST))
    pair.move(pair.place.with_layers_moved(2, 1, HOST))
    run_prompts(pair.home, [make_prompt(20)], greedy(2))
    return pair


def with_number(step: PackedStep, field: int, value: int) -> PackedStep:
    """The step with the first number of one of StepBatch's tensors changed."""
    packed = step.packed.clone()
    step.shape.split(packed)[field].view(-1)[0] = value
    return replace(step, packed=packed)


STAGE_FAULTS: list[tuple[str, Callable[[StageWork], StageWork]]] = [
    ("version 1; here it is 2", lambda work: replace(work, version=1)),
    ("came to 'home'", lambda work: replace(work, instance="else")),
    ("came after step", lambda work: replace(work, step_id=work.step_id - 1)),
    ("layer 1 was not granted", lambda work: replace(work, layers=range(1, 3))),
    ("layer 0 was not granted", lambda work: replace(work, layers=range(0, 3, 2))),
    ("layers 2 to 4", lambda work: replace(work, layers=range(2, 4))),
    ("layers 2 to 2", lambda work: replace(work, layers=range(2, 2))),
    ("hidden states", lambda work: replace(work, hidden=work.hidden[:, :-1].contiguous())),
    ("hidden states", lambda work: replace(work, hidden=work.hidden.double())),
    ("hidden states", lambda work: replace(work, hidden=torch.cat([work.hidden, work.hidden]))),
    ("places to write", lambda work: replace(work, step=with_number(work.step, 2, 5))),
    ("blocks of decodes", lambda work: replace(work, step=with_number(work.step, 4, 1000))),
    ("blocks of decodes", lambda work: replace(work, step=with_number(work.step, 4, -1))),
    ("contexts of decodes", lambda work: replace(work, step=with_number(work.step, 5, 10_000))),
    ("fresh blocks", lambda work: replace(work, fresh_blocks=torch.tensor([1000]))),
    ("Error", lambda work: replace(work, step=None)),
]


@pytest.mark.parametrize(("words", "change"), STAGE_FAULTS)
def test_stage_outside_the_grant_is_an_error(
    words: str, change: Callable[[StageWork], StageWork], pair: TwoWorkers
) -> None:
    pair._step_id += 1
    work = pair.work(range(2, 3), pair.hidden[-1])
    before = pair.host.loaded.arena.page_words.clone()
    done = pair.hosted.run(change(work))
    assert done.hidden is None
    assert words in (done.error or "")
    assert torch.equal(pair.host.loaded.arena.page_words, before)
    assert pair.hosted.run(work).error is None


def with_step(work: HeadWork, step: PackedStep) -> HeadWork:
    assert work.tables is not None
    return replace(work, tables=replace(work.tables, step=step))


def step_of(work: HeadWork) -> PackedStep:
    assert work.tables is not None
    return work.tables.step


HEAD_FAULTS: list[tuple[str, Callable[[HeadWork], HeadWork]]] = [
    ("version 1; here it is 2", lambda work: replace(work, version=1)),
    ("came to 'home'", lambda work: replace(work, instance="else")),
    ("came after step", lambda work: replace(work, step_id=work.step_id - 1)),
    ("KV heads [0, 1] were asked for, [1] are here", lambda work: replace(work, heads=range(2))),
    ("KV heads [] were asked for", lambda work: replace(work, heads=range(0))),
    ("KV heads [1] were asked for, [] are here", lambda work: replace(work, layer=1)),
    ("layer 9", lambda work: replace(work, layer=9)),
    ("q, k and v", lambda work: replace(work, qkv=work.qkv[:, :-1].contiguous())),
    ("q, k and v", lambda work: replace(work, qkv=torch.cat([work.qkv, work.qkv]))),
    ("q, k and v", lambda work: replace(work, qkv=work.qkv.transpose(1, 2))),
    ("q, k and v", lambda work: replace(work, qkv=work.qkv.double())),
    ("blocks of decodes", lambda work: with_step(work, with_number(step_of(work), 4, 1000))),
    ("without its tables", lambda work: replace(work, step_id=work.step_id + 1, tables=None)),
    ("Error", lambda work: replace(work, qkv=None)),
]


@pytest.mark.parametrize(("words", "change"), HEAD_FAULTS)
def test_heads_outside_the_grant_are_an_error(
    words: str, change: Callable[[HeadWork], HeadWork], pair: TwoWorkers
) -> None:
    pair._step_id += 1
    spec = pair.home.loaded.spec
    work = pair.head_work(0, range(1, 2), torch.rand(1, spec.group_size + 2, spec.head_dim))
    before = pair.host.loaded.arena.page_words.clone()
    done = pair.hosted.attend(change(work))
    assert done.out is None
    assert words in (done.error or "")
    assert torch.equal(pair.host.loaded.arena.page_words, before)
    assert pair.hosted.attend(work).error is None


def test_nothing_runs_before_the_switch_or_without_weights(llama_folder: Path, make_engine: MakeEngine) -> None:
    pair = TwoWorkers(make_engine(llama_folder, kv_cache_blocks=8), make_engine(llama_folder, kv_cache_blocks=64))
    run_prompts(pair.home, [make_prompt(20)], greedy(2))
    pair.host.lanes_departed([], [2])
    pair.host.grant(HOME, [(2, 0)], [2], 8, pair.home.loaded.fingerprint)
    work = pair.work(range(2, 3), pair.hidden[-1])
    assert "here it is None" in (pair.hosted.run(work).error or "")
    pair.hosted.use_version(0)
    assert "weights of layer 2 have not arrived" in (pair.hosted.run(work).error or "")
    pair.host.grant(HOME, [(0, 0)], [0], 8, pair.home.loaded.fingerprint)
    assert "KV heads [0] are here" in (pair.hosted.run(replace(work, layers=range(1))).error or "")
    with pytest.raises(ValueError, match="has version 0 already"):
        pair.hosted.use_version(0)


def test_a_later_version_ends_the_earlier_ones(pair: TwoWorkers) -> None:
    """A move that concerns other workers is not told to this one: its work says so."""
    pair._step_id += 1
    work = pair.work(range(2, 3), pair.hidden[-1])
    assert pair.hosted.run(replace(work, version=5)).error is None
    assert "version 4; here it is 5" in (
        pair.hosted.run(replace(work, version=4, step_id=work.step_id + 1)).error or ""
    )


def test_host_serves_its_own_requests_meanwhile(llama_folder: Path, make_engine: MakeEngine) -> None:
    """Own steps and hosted ones in turns, in one arena, and a second instance that comes in between."""
    pair = TwoWorkers(make_engine(llama_folder, kv_cache_blocks=12), make_engine(llama_folder, kv_cache_blocks=48))
    pair.move(pair.place.with_layers_moved(2, 1, HOST))
    prompts = [make_prompt(40, 1), make_prompt(50, 2), make_prompt(60, 3), make_prompt(30, 4)]
    engines = [pair.home, pair.home, pair.host, pair.host]
    outputs: dict[str, list[int]] = {str(i): [] for i in range(4)}
    for i, (engine, prompt) in enumerate(zip(engines, prompts, strict=True)):
        assert engine.add(EngineRequest(str(i), prompt, greedy(24))) is None
    for turn in range(30):
        if turn == 8:
            granted = pair.host.grant("third", [(1, 0), (1, 1)], [1], 40, pair.home.loaded.fingerprint)
            assert granted.blocks_given_up > 0
        for engine in (pair.home, pair.host):
            for event in engine.step().events:
                outputs[event.request_id].append(event.token_id or 0)
    assert not pair.home.has_work
    assert not pair.host.has_work
    assert_greedy(load_reference(llama_folder), prompts, list(outputs.values()))
