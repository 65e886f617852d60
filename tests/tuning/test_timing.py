from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tuning.round_figures import measured
from tuning.hardware_profile import HardwareProfile
from tuning.model_config import read_model_shape
from tuning.model_shape import ModelShape
from tuning.timing import Timing

# Round figures: 1,000 numbers in matrices, 40 bytes of KV a token.
MODEL = ModelShape(
    name="toy",
    num_layers=1,
    hidden_size=10,
    intermediate_size=20,
    num_heads=1,
    num_kv_heads=1,
    head_dim=10,
    vocab_size=50,
    max_context_tokens=1000,
)
# 1,000 operations and 100 bytes a second are reached.
DEVICE = HardwareProfile(
    name="toy-device",
    flops_per_s=2000.0,
    memory_bytes=10_000,
    memory_bytes_per_s=200.0,
    host_link_bytes_per_s=10.0,
    network_bytes_per_s=5.0,
    prefill_efficiency=0.5,
    decode_efficiency=0.5,
    step_overhead_s=0.25,
    memory_share=0.9,
)
TIMING = Timing(MODEL, DEVICE)

MEASURED = measured("toy")
FITTED = Timing(MODEL, replace(DEVICE, measured=(MEASURED,)))
QWEN3_8B = read_model_shape("qwen3-8b")

timings = st.sampled_from(
    [TIMING, FITTED, Timing(QWEN3_8B, replace(DEVICE, flops_per_s=1e14, memory_bytes_per_s=1e12))]
)
tokens = st.integers(0, 100_000)


def test_the_toy_has_round_figures() -> None:
    assert MODEL.flops_per_token == 2000
    assert MODEL.head_flops == 1000
    assert MODEL.step_weight_bytes == 2 * 1500  # without the embedding
    assert MODEL.kv_bytes_per_token == 40
    assert MODEL.attention_flops_per_pair == 40


def test_a_long_prompt_takes_as_long_as_it_computes() -> None:
    # 100 tokens: 200,000 operations in matrices, 40 * 100 * 100 / 2 in attention, at 1,000 a second.
    assert TIMING.prefill_s(100, 0) == pytest.approx(0.25 + 200.0 + 200.0)


def test_a_cached_prefix_is_attended_to_but_not_computed() -> None:
    # 100 tokens after 300: 40 * 100 * (300 + 50) operations in attention.
    assert TIMING.prefill_s(100, 300) == pytest.approx(0.25 + 200.0 + 1400.0)


def test_a_short_prompt_takes_as_long_as_weights_and_prefix_are_read() -> None:
    # 1 token after 299: 3,000 bytes of weights against 2 s of computing; 300 * 40 bytes of KV against 40 * 299.5
    # operations; at 100 bytes and 1,000 operations a second.
    assert TIMING.prefill_s(1, 299) == pytest.approx(0.25 + 30.0 + 120.0)


def test_a_small_batch_takes_as_long_as_weights_and_kv_are_read() -> None:
    # 2 sequences compute 6 s, weights are read in 30 s; each token of context is 40 bytes or 40 operations.
    assert TIMING.decode_step_s(2, 50) == pytest.approx(0.25 + 30.0 + 50 * 0.4)


def test_a_large_batch_takes_as_long_as_it_computes() -> None:
    assert TIMING.decode_step_s(20, 50) == pytest.approx(0.25 + 20 * 3.0 + 50 * 0.4)


def test_attention_of_many_heads_to_little_kv_computes_longer_than_it_reads() -> None:
    grouped = Timing(replace(MODEL, num_heads=100), DEVICE)
    # 4,000 operations a token of context at 1,000 a second, 40 bytes at 100.
    assert grouped.context_token_s == pytest.approx(4.0)


def test_a_step_of_prompts_and_decodes_reads_weights_once() -> None:
    # 10 new tokens and 2 decodes compute 26 s, weights are read in 30 s. Attention of 6 tokens reads KV for 2.4 s and
    # computes for 0.72 s; that of 4 after 20 for 9.6 s and 3.52 s.
    seconds = TIMING.step_s([(6, 0), (4, 20)], 2, 50)
    assert seconds == pytest.approx(0.25 + 30.0 + 2.4 + 9.6 + 20.0)


def test_nothing_to_do_takes_no_time() -> None:
    assert TIMING.step_s([], 0, 0) == 0.0
    assert FITTED.step_s([], 0, 0) == 0.0


def test_measured_times_go_before_peak_figures() -> None:
    assert FITTED.prefill_s(100, 0) == pytest.approx(0.5 + 1.0 + 0.001 * 100**2)
    assert FITTED.prefill_s(100, 300) == pytest.approx(0.5 + 1.0 + 0.001 * (400**2 - 300**2))
    assert FITTED.decode_step_s(4, 50) == pytest.approx(0.2 + 0.15 + 0.16)
    assert FITTED.step_s([(100, 0)], 4, 50) == pytest.approx(0.5 + 1.0 + 10.0 + 0.15 + 0.16)


def test_times_that_were_measured_in_another_dtype_are_not_used() -> None:
    single = Timing(replace(MODEL, dtype_bytes=4), replace(DEVICE, measured=(MEASURED,)))
    assert single.prefill_s(100, 0) == Timing(replace(MODEL, dtype_bytes=4), DEVICE).prefill_s(100, 0)


@given(timing=timings, new=tokens, cached=tokens, batch=st.integers(1, 500), context=tokens)
def test_steps_of_one_kind_agree_with_the_general_one(
    timing: Timing, new: int, cached: int, batch: int, context: int
) -> None:
    assert timing.prefill_s(new, cached) == timing.step_s([(new, cached)], 0, 0)
    assert timing.decode_step_s(batch, context) == pytest.approx(timing.step_s([], batch, context), rel=1e-12)


@given(timing=timings, new=tokens, cached=tokens, batch=st.integers(0, 500), context=tokens, more=st.integers(0, 5000))
def test_more_work_never_takes_less_time(
    timing: Timing, new: int, cached: int, batch: int, context: int, more: int
) -> None:
    seconds = timing.step_s([(new, cached)], batch, context)
    assert timing.step_s([(new + more, cached)], batch, context) >= seconds
    assert timing.step_s([(new, cached + more)], batch, context) >= seconds
    assert timing.step_s([(new, cached)], batch + more, context) >= seconds
    assert timing.step_s([(new, cached)], batch, context + more) >= seconds
    assert timing.step_s([(new, cached), (more, 0)], batch, context) >= seconds
    assert timing.decode_step_s(batch + 1 + more, context) >= timing.decode_step_s(batch + 1, context)


@settings(max_examples=50)
@given(timing=timings, batch=st.integers(1, 500), context=tokens, steps=st.integers(0, 2000))
def test_many_decode_steps_are_the_sum_of_each(timing: Timing, batch: int, context: int, steps: int) -> None:
    each = math.fsum(timing.decode_step_s(batch, context + number * batch) for number in range(steps))
    assert timing.decode_steps_s(batch, context, steps) == pytest.approx(each, rel=1e-12)


@given(timing=timings, batch=st.integers(1, 500), context=tokens, seconds=st.floats(0, 1e6))
@example(TIMING, 2, 50, 50.25)  # exactly one step
@example(TIMING, 2, 50, 0.0)
def test_steps_within_a_time_are_the_most_that_fit(timing: Timing, batch: int, context: int, seconds: float) -> None:
    steps = timing.steps_within(batch, context, seconds)
    assert timing.decode_steps_s(batch, context, steps) <= seconds or steps == 0
    assert timing.decode_steps_s(batch, context, steps + 1) > seconds


@given(timing=timings, batch=st.integers(1, 500), context=tokens, steps=st.integers(0, 5000))
def test_steps_within_is_the_inverse(timing: Timing, batch: int, context: int, steps: int) -> None:
    assert timing.steps_within(batch, context, timing.decode_steps_s(batch, context, steps)) == steps


def test_the_pool_is_what_the_weights_leave() -> None:
    # 0.9 of 10,000 bytes less 4,000 bytes of weights, 40 bytes a token.
    assert TIMING.kv_pool_tokens() == 125
    assert Timing(MODEL, replace(DEVICE, memory_bytes=4500)).kv_pool_tokens() == 1
    with pytest.raises(ValueError, match=r"the weights of toy take .* toy-device has .*several devices together"):
        Timing(MODEL, replace(DEVICE, memory_bytes=4488)).kv_pool_tokens()
