"""What a worker tells a controller, from real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest
from actors.planner_reading import model_sizes, take_reading
from migrate.worker_reading import figures_between
from tests.engine_driver import greedy, make_prompt, run_requests
from tests.reference import FAMILIES, make_model


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=64, max_batch_tokens=64)
    return Engine(load_model(make_model(FAMILIES["llama"], tmp_path), config), config)


def request(name: str, tokens: int, max_tokens: int, **more: object) -> EngineRequest:
    return EngineRequest(name, make_prompt(tokens, ord(name[0])), greedy(max_tokens), **more)  # type: ignore[arg-type]


def test_steps_are_counted_by_what_is_in_them(engine: Engine) -> None:
    # 100 and 40 tokens in steps of 64: 64, then 36 + 28, then one decode and 12, then decodes of both. Each request has
    # 3 decodes after its first token.
    run_requests(engine, [request("a", 100, 4), request("b", 40, 4)])
    reading = take_reading("w", engine, 5.0)
    assert (reading.prefill_steps, reading.prefill_tokens) == (3, 140)
    assert (reading.decode_steps, reading.decode_rows, reading.decoding_requests) == (4, 6, 6)
    assert (reading.finished_requests, reading.generated_tokens) == (2, 8)
    assert (reading.pending_prefill_tokens, reading.waiting_answers, reading.live_blocks) == (0, 0, 0)
    # Full blocks of 16 tokens stay findable: 103 tokens and 43.
    assert reading.cached_blocks == 6 + 2 == len(engine.blocks.occupied())
    assert take_reading("w", engine, 5.0, store_has_cached=True).cached_blocks == 0  # they stay behind
    assert (reading.worker, reading.taken_s, reading.full_batch, reading.total_blocks) == ("w", 5.0, 64, 64)


def test_what_the_engine_bounds_is_told(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=64, hosted_slice_s=0.25)
    engine = Engine(load_model(make_model(FAMILIES["llama"], tmp_path), config), config)
    assert take_reading("w", engine, 5.0).hosted_slice_s == 0.25


def test_what_waits_is_told_and_hand_overs_generate_nothing(engine: Engine) -> None:
    engine.add(request("a", 100, 9))
    engine.add(request("b", 40, 30, hand_over=True))
    reading = take_reading("w", engine, 5.0)
    assert (reading.pending_prefill_tokens, reading.waiting_answers, reading.waiting_answer_tokens) == (140, 1, 9)


def test_figures_follow_from_two_readings(engine: Engine) -> None:
    before = take_reading("w", engine, 1.0)
    run_requests(engine, [request(name, 64, 11) for name in "abcd"])
    figures = figures_between(before, take_reading("w", engine, 3.0))
    # 4 x 64 prompt tokens, and 4 x 10 decodes, in 2 s. What is left of a prompt counts as a decode if it is one token.
    assert figures.prefill_tokens_per_s == pytest.approx(128, abs=2)
    assert figures.decode_tokens_per_s == pytest.approx(20, abs=2)
    assert figures.prefill_tokens_per_s + figures.decode_tokens_per_s == 148
    assert 1 < figures.running <= 4
    assert figures.prefill_step_tokens == pytest.approx(256 / engine.counters.prefill_steps, abs=1)


def test_a_reading_stays_as_it_was(engine: Engine) -> None:
    run_requests(engine, [request("a", 64, 20)])
    reading = take_reading("w", engine, 1.0)
    counted = reading.step_times.layers.count
    run_requests(engine, [request("b", 64, 20)])
    assert reading.step_times.layers.count == counted < engine.clock.times.layers.count


def test_what_steps_cost_adds_up_to_what_they_took(engine: Engine) -> None:
    run_requests(engine, [request("a", 64, 17)])  # the first 16 steps do not count
    busy_s, steps = engine.counters.busy_s, engine.counters.steps
    assert engine.clock.times.layers.count == steps - 16
    run_requests(engine, [request(name, tokens, 30) for name, tokens in (("b", 60), ("c", 200), ("d", 20))])
    times = engine.clock.times
    assert times.layers.count == engine.counters.steps - 16
    spent_s = engine.counters.busy_s - busy_s
    # The fit has a constant, so that its mean error is nothing, or it would not be the best one; at least it is of the
    # size of what was measured.
    mean_s = sum(weight * times.layers.mean(term) for term, weight in enumerate(times.layers.fit()))
    head_s = sum(weight * times.head.mean(term) for term, weight in enumerate(times.head.fit()))
    assert (mean_s + head_s) * (engine.counters.steps - steps) == pytest.approx(spent_s, rel=0.2)
    measured = times.measured(engine.loaded.spec.num_layers, 64)
    assert measured is not None
    assert measured.prefill_token_s > 0
    assert measured.step_s + measured.row_s > 0


def test_sizes_are_those_of_the_arena(engine: Engine) -> None:
    sizes, arena, spec = model_sizes(engine.loaded), engine.loaded.arena, engine.loaded.spec
    reading = take_reading("w", engine, 0.0)
    assert reading.sizes == sizes
    free_of_weights = reading.memory_bytes - sizes.num_layers * sizes.layer_weight_bytes
    # 64 blocks in every lane, and nothing else.
    assert free_of_weights == 64 * sizes.num_layers * sizes.num_kv_heads * sizes.page_bytes
    assert sizes.page_bytes == arena.pages[0].nbytes
    assert sizes.hidden_bytes == 4 * spec.hidden_size
    weights = engine.loaded.model.layers[0]["qkv.weight"]
    assert weights.shape[0] * 4 == spec.num_kv_heads * (sizes.query_bytes + 2 * sizes.key_bytes)
