"""What is stored, fetched, handed over and evicted: tiny traces, worked out by hand (`tiny` has the figures)."""

from __future__ import annotations

import numpy as np
import pytest

from kv.policy.policy_file import GroupTtl, PolicySpec
from tests.tuning.simulator.tiny import BLOCK_BYTES, is_at, make_settings, make_timing, make_trace, names, run
from tuning.simulator.group_roots import root_key
from tuning.simulator.simulation import simulate


def test_fetch_and_computing_overlap_layer_by_layer() -> None:
    """Half of the second prompt is stored: 50,000 bytes. f + c + 3 max(f, c), with four layers."""
    rows = [(0.0, 100, 1, names("a", 10)), (1.0, 100, 1, [*names("a", 5), *names("b", 5)])]
    fast = run(rows, dram_read_bytes_per_s=2e6)  # 25 ms beside 50 ms of computing
    assert is_at(fast.first_token_s[1:], 1.0 + 0.00625 + 0.0125 + 3 * 0.0125)
    assert fast.hit_tokens_dram[1] == 50
    rows[1] = (1.0, 100, 1, [*names("a", 7), *names("b", 3)])
    slow = run(rows, dram_read_bytes_per_s=1.25e6)  # 56 ms beside 30 ms
    assert is_at(slow.first_token_s[1:], 1.0 + 0.014 + 0.0075 + 3 * 0.014)
    link = run(rows, link_bytes_per_s=1.25e6)
    assert is_at(link.first_token_s[1:], 1.0 + 0.014 + 0.0075 + 3 * 0.014)


def test_what_takes_longer_to_fetch_than_to_compute_is_computed() -> None:
    rows = [(0.0, 100, 1, names("a", 10)), (1.0, 100, 1, [*names("a", 5), *names("b", 5)])]
    result = run(rows, dram_read_bytes_per_s=0.9e6)
    assert is_at(result.first_token_s[1:], 1.100)
    assert (result.hit_tokens_dram[1], result.computed_tokens[1], result.moved.dram_fetched) == (0, 100, 0)


def test_a_prompt_that_is_all_there_computes_its_last_token() -> None:
    result = run([(0.0, 100, 1, names("a", 10)), (1.0, 100, 1, names("a", 10))])
    assert (result.hit_tokens_dram[1], result.computed_tokens[1]) == (99, 1)
    assert is_at(result.first_token_s[1:], 1.001)


@pytest.mark.parametrize(("partial_blocks", "hit"), [("miss", 20), ("hit", 24)])
def test_a_partial_last_block_hits_only_where_it_may(partial_blocks: str, hit: int) -> None:
    result = run([(0.0, 25, 1, names("a", 3)), (1.0, 25, 1, names("a", 3))], partial_blocks=partial_blocks)
    assert result.hit_tokens_dram.tolist() == [0, hit]


def test_decode_waits_for_the_write_back_and_the_hand_over() -> None:
    """100,000 bytes take 100 ms each way; four layers of 25 ms, computed and written as they come."""
    result = run([(0.0, 100, 3, names("a", 10))], dram_write_bytes_per_s=1e6, dram_read_bytes_per_s=2e6)
    assert is_at(result.first_token_s, 0.100)
    # Written at 0.025 + 0.025 + 3 * 0.025, read after that, then two steps.
    assert is_at(result.end_s, 0.125 + 0.050 + 0.020)
    slow = run([(0.0, 100, 3, names("a", 10))], dram_write_bytes_per_s=0.5e6)
    assert is_at(slow.end_s, 0.025 + 0.050 + 3 * 0.050 + 0.020)


def test_transfers_wait_for_each_other() -> None:
    """Two instances write 50 ms each at the same time: one after the other."""
    rows = [(0.0, 10, 2, ["a"]), (0.0, 10, 2, ["b"])]
    result = run(rows, prefill_instances=2, dram_write_bytes_per_s=0.2e6)
    # From 2.5 ms on, when the first layer is there: to 52.5 ms, then to 102.5 ms.
    assert is_at(np.sort(result.end_s), 0.0625, 0.1125)
    assert result.dram.write_waited_s == pytest.approx(0.050)
    assert result.dram.write_busy_s == pytest.approx(0.100)


def test_the_least_recently_used_goes() -> None:
    rows = [
        (0.0, 20, 1, names("a", 2)),
        (1.0, 20, 1, names("b", 2)),
        (2.0, 20, 1, names("a", 2)),
        (3.0, 20, 1, names("c", 2)),  # in place of b
        (4.0, 20, 1, names("a", 2)),
        (5.0, 20, 1, names("b", 2)),
    ]
    result = run(rows, dram_bytes=4 * BLOCK_BYTES)
    assert result.hit_tokens_dram.tolist() == [0, 0, 19, 0, 19, 0]
    assert (result.dram.evicted_blocks, result.dram.used_bytes) == (4, 4 * BLOCK_BYTES)


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    rows = [(0.0, 30, 1, names("a", 3)), (1.0, 20, 1, names("b", 2)), (2.0, 30, 1, names("a", 3))]
    assert run(rows, dram_bytes=4 * BLOCK_BYTES).hit_tokens_dram[2] == 20
    assert run(rows, dram_bytes=4 * BLOCK_BYTES, touch_order="front_to_back").hit_tokens_dram[2] == 0


def test_what_is_larger_than_the_tier_leaves_its_beginning_there() -> None:
    result = run([(0.0, 60, 1, names("a", 6)), (1.0, 60, 1, names("a", 6))], dram_bytes=4 * BLOCK_BYTES)
    assert result.hit_tokens_dram[1] == 40
    assert result.dram.peak_bytes == 4 * BLOCK_BYTES


def test_a_time_to_live_counts_from_the_last_use() -> None:
    """Stored at 0.1; a use after exactly half a second is a hit, and one later is not."""
    policy = PolicySpec(default_ttl_s=0.5)
    rows = [(0.0, 100, 1, names("a", 10)), (0.6, 100, 1, names("a", 10))]
    assert run(rows, policy=policy).hit_tokens_dram[1] == 99
    rows[1] = (0.600001, 100, 1, names("a", 10))
    late = run(rows, policy=policy)
    assert (late.hit_tokens_dram[1], late.dram.expired_blocks) == (0, 10)


def test_groups_have_times_to_live_of_their_own() -> None:
    """The group's root is the second block of `a`: the first one is of the rest."""
    prompts = (names("a", 3), names("b", 3))
    trace = make_trace([(arrival_s, 30, 1, prompt) for arrival_s in (0.0, 1.0) for prompt in prompts])
    long = PolicySpec(default_ttl_s=0.5, groups=(GroupTtl("long", root_key(0), None),))
    assert simulate(trace, make_timing(), make_settings(policy=long)).hit_tokens_dram.tolist() == [0, 0, 29, 0]
    short = PolicySpec(groups=(GroupTtl("short", root_key(1), 0.5),))
    assert simulate(trace, make_timing(), make_settings(policy=short)).hit_tokens_dram.tolist() == [0, 0, 10, 29]
    with pytest.raises(ValueError, match="no block of this trace"):
        simulate(trace, make_timing(), make_settings(policy=PolicySpec(groups=(GroupTtl("x", root_key(6), 1.0),))))
