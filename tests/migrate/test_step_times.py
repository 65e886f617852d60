from __future__ import annotations

from itertools import product

import pytest

from migrate.step_times import LEAST_PROMPT_STEPS, LEAST_STEPS, StepTimes

LAYERS = 4


def steps(times: StepTimes, *, prompts: list[tuple[int, int]], decodes: list[tuple[int, int]]) -> None:
    """Steps of every pair of (prompt tokens, tokens before them) and (rows, context of each). A step takes 8 ms, and
    for each prompt token 4 ms and 40 us a pair, for each row 2 ms and 20 us a pair; then 3 ms and 1 ms a row."""
    for (tokens, before), (rows, context) in product(prompts, decodes):
        prefill_pairs = tokens * before + tokens * (tokens + 1) // 2
        decode_pairs = rows * context
        times.count(
            prefill_tokens=tokens,
            decode_rows=rows,
            prefill_pairs=prefill_pairs,
            decode_pairs=decode_pairs,
            layers_s=0.008 + 0.004 * tokens + 4e-5 * prefill_pairs + 0.002 * rows + 2e-5 * decode_pairs,
        )
        times.count_head(rows, 0.003 + 0.001 * rows)


def test_a_steps_cost_is_told_apart() -> None:
    times = StepTimes()
    # Half of the steps have 8 prompt tokens behind 0 or 96 others, half none; rows are 0 to 8, contexts 50 or 150.
    contexts = [(0, 0), *((rows, context) for rows in (2, 4, 8) for context in (50, 150))]
    steps(times, prompts=[(8, 0), (8, 96), (0, 0), (0, 0), (0, 0)], decodes=contexts)
    measured = times.measured(LAYERS, full_batch=16)
    assert measured is not None
    # A prompt token has (8 x 96 / 2 + 36) / 8 = 52.5 pairs on average: 2.1 ms of attention beside 4 ms.
    assert measured.prefill_token_s == pytest.approx(0.0061 / LAYERS)
    assert measured.prefill_attention_share == pytest.approx(2.1 / 6.1)
    # A row has 100 pairs: 2 ms beside 2 ms.
    assert measured.row_s == pytest.approx(0.004 / LAYERS)
    assert measured.step_s == pytest.approx(0.008 / LAYERS)
    # A step has 28 / 7 = 4 rows on average: 8 ms of attention in 8 + 16 ms.
    assert measured.decode_attention_share == pytest.approx(8 / 24)
    assert (measured.head_step_s, measured.head_row_s) == (pytest.approx(0.003), pytest.approx(0.001))
    assert measured.full_batch == 16


def test_without_decodes_a_row_costs_nothing_that_is_known() -> None:
    times = StepTimes()
    steps(times, prompts=[(tokens, before) for tokens in range(1, 9) for before in (0, 5, 9, 100)], decodes=[(0, 0)])
    measured = times.measured(LAYERS, full_batch=16)
    assert measured is not None
    assert (measured.row_s, measured.decode_attention_share) == (0, 0)
    assert measured.step_s == pytest.approx(0.008 / LAYERS)


def test_a_few_steps_say_nothing() -> None:
    times = StepTimes()
    for _ in range(LEAST_STEPS - 1):
        steps(times, prompts=[(4, 0)], decodes=[(1, 3)])
    assert times.measured(LAYERS, full_batch=16) is None
    steps(times, prompts=[(4, 0)], decodes=[(1, 3)])
    assert times.measured(LAYERS, full_batch=16) is not None


def test_one_long_prompt_is_one_steps_word() -> None:
    times = StepTimes()
    for tokens in (512, *[1] * 40):
        times.count(prefill_tokens=tokens, decode_rows=0, prefill_pairs=0, decode_pairs=0, layers_s=0.001 * tokens)
    # 552 ** 2 / (512 ** 2 + 40) = 1.2 steps of 512 tokens.
    assert (times.knows_prompts, times.knows_decodes) == (False, False)
    for _ in range(LEAST_PROMPT_STEPS - 1):
        times.count(prefill_tokens=512, decode_rows=0, prefill_pairs=0, decode_pairs=0, layers_s=0.5)
    assert times.knows_prompts
    for rows in range(LEAST_STEPS + 4):
        times.count(prefill_tokens=0, decode_rows=1 + rows % 2, prefill_pairs=0, decode_pairs=0, layers_s=0.03)
    assert times.knows_decodes


def test_what_one_row_cannot_cost_belongs_to_the_step() -> None:
    """A prompt token costs 0.1 ms and 1 us a pair. Steps with one row of 100 tokens take 30 ms, and no others are known
    with rows: all of it would be the row's. It can have 0.1 ms and 0.8 ms of attention."""
    times = StepTimes()
    for tokens in (8, 64, 256, 512):
        for _ in range(5):
            pairs = tokens * (tokens + 1) // 2
            times.count(prefill_tokens=tokens, decode_rows=0, prefill_pairs=pairs, decode_pairs=0,
                        layers_s=1e-4 * tokens + 1e-6 * pairs)  # fmt: skip
    for _ in range(20):
        times.count(prefill_tokens=0, decode_rows=1, prefill_pairs=0, decode_pairs=100, layers_s=0.03)
    measured = times.measured(LAYERS, full_batch=16)
    assert measured is not None
    assert measured.row_s == pytest.approx((1e-4 + 8e-4) / LAYERS)
    # What is left of 30 ms, over all steps: half of them have the row.
    assert measured.step_s == pytest.approx((0.03 - 9e-4) / 2 / LAYERS)


def test_workers_add_up() -> None:
    contexts = [(rows, context) for rows in (1, 4, 8) for context in (5, 70, 200)]
    one, two, both = StepTimes(), StepTimes(), StepTimes()
    prompts = [(8, 0), (3, 50), (8, 70), (5, 200)]
    steps(one, prompts=prompts, decodes=[(0, 0)] * 10)
    steps(two, prompts=[(0, 0)] * 5, decodes=contexts)
    steps(both, prompts=prompts, decodes=[(0, 0)] * 10)
    steps(both, prompts=[(0, 0)] * 5, decodes=contexts)
    together, at_once = one.plus(two).measured(LAYERS, 8), both.measured(LAYERS, 8)
    assert together is not None
    assert at_once is not None
    assert together.row_s == pytest.approx(at_once.row_s)
    assert together.prefill_token_s == pytest.approx(at_once.prefill_token_s)
    assert together.decode_attention_share == pytest.approx(at_once.decode_attention_share)
