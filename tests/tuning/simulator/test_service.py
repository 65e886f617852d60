"""Prefill and decode, alone and in queues: tiny traces, worked out by hand (`tiny` has the figures)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.tuning.simulator.tiny import is_at, make_settings, make_timing, make_trace, names, run
from tuning.simulator.simulation import simulate


def test_one_request_alone() -> None:
    result = run([(0.0, 100, 3, names("a", 10))])
    assert is_at(result.first_token_s, 0.100)
    assert is_at(result.end_s, 0.120)
    assert result.computed_tokens.tolist() == [100]


def test_prompts_are_computed_one_after_the_other() -> None:
    result = run([(0.0, 100, 1, names("a", 10)), (0.0, 50, 1, names("b", 5)), (0.2, 20, 1, names("c", 2))])
    assert is_at(result.prefill_start_s, 0.0, 0.100, 0.200)
    assert is_at(result.first_token_s, 0.100, 0.150, 0.220)
    assert is_at(result.end_s, 0.100, 0.150, 0.220)


def test_what_arrives_together_is_served_in_the_order_of_the_trace() -> None:
    result = run([(0.0, 10 * size, 1, names(str(size), size)) for size in (3, 1, 2)])
    assert is_at(result.first_token_s, 0.030, 0.040, 0.060)


def test_a_prompt_that_ends_when_another_comes_ends_first() -> None:
    """What ends goes before what begins: the second finds the first one's blocks."""
    result = run([(0.0, 100, 1, names("a", 10)), (0.1, 100, 1, names("a", 10))])
    assert result.hit_tokens_dram.tolist() == [0, 99]
    assert is_at(result.first_token_s, 0.100, 0.101)


def test_a_sequence_joins_at_the_end_of_the_running_step() -> None:
    result = run([(0.0, 10, 4, ["a"]), (0.0, 5, 2, ["b"])])
    assert is_at(result.first_token_s, 0.010, 0.015)
    assert is_at(result.end_s, 0.040, 0.030)  # the second waits from 0.015 for the step that ends at 0.020
    gaps = np.repeat(result.gap_s, result.gap_count)
    assert is_at(np.sort(gaps), 0.010, 0.010, 0.010, 0.015)


def test_a_step_takes_longer_for_more_sequences_and_longer_contexts() -> None:
    timing = make_timing(step_s=0.010, row_s=0.001, context_token_s=0.0001)
    alone = simulate(make_trace([(0.0, 10, 3, ["a"])]), timing, make_settings())
    # Steps over 11 and 12 tokens.
    assert is_at(alone.end_s, 0.010 + 2 * 0.011 + 23 * 0.0001)
    both = simulate(make_trace([(0.0, 10, 3, ["a"]), (0.0, 20, 2, ["b", "b1"])]), timing, make_settings())
    # The other comes at 0.030 and joins at 0.0343, when the first has its last token.
    assert is_at(both.end_s, 0.0343, 0.0343 + 0.011 + 21 * 0.0001)
    rows = [(0.0, 10, 4, ["a"]), (0.0, 20, 2, ["b", "b1"])]
    together = simulate(make_trace(rows), timing, make_settings())
    # Now they share a step over 13 and 21 tokens.
    assert is_at(together.end_s, *2 * [0.0343 + 0.012 + 34 * 0.0001])


def test_requests_wait_until_decode_has_room() -> None:
    """Each takes 11 blocks to its end, and there are 20."""
    rows = [(0.0, 100, 11, names("a", 10)), (0.0, 100, 2, names("b", 10))]
    result = run(rows, device_pool_blocks=20)
    assert is_at(result.admitted_s, 0.0, 0.200)
    assert is_at(result.first_token_s, 0.100, 0.300)
    assert run(rows, device_pool_blocks=22).admitted_s.tolist() == [0.0, 0.0]
    assert run(rows, max_running_requests=1).admitted_s[1] == pytest.approx(0.200)


def test_what_fits_nowhere_is_refused_and_the_others_go_on() -> None:
    result = run([(0.0, 100, 1, names("a", 10)), (0.1, 30, 1, names("b", 3))], device_pool_blocks=5)
    assert result.refused == (0,)
    assert np.isnan(result.end_s[0])
    assert is_at(result.end_s[1:], 0.130)
    assert result.summary()["completed_requests"] == 1
