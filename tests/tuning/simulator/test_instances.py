"""What instances keep, answers, and monolithic instances: worked out by hand (`tiny` has the figures)."""

from __future__ import annotations

from tests.tuning.simulator.tiny import BLOCK_BYTES, is_at, make_settings, make_timing, make_trace, names, run
from tuning.simulator.simulation import simulate


def test_an_instance_finds_what_it_has_itself_first() -> None:
    rows = [(0.0, 100, 1, names("a", 10)), (1.0, 100, 1, [*names("a", 5), *names("b", 5)])]
    result = run(rows, local_prefix_cache=True, dram_read_bytes_per_s=1.0)
    assert (result.hit_tokens_device[1], result.hit_tokens_dram[1]) == (50, 0)
    assert is_at(result.first_token_s[1:], 1.050)
    other = run(rows, local_prefix_cache=True, device_pool_blocks=10)
    assert other.hit_tokens_device[1] == 50


def test_the_next_turn_finds_the_answer() -> None:
    """The first answers with 20 tokens: its 24 tokens of KV beyond 15 fill two more blocks."""
    chain = names("a", 6)
    trace = make_trace([(0.0, 25, 20, [*chain[:2], "tail"]), (1.0, 60, 1, chain)], parents=[-1, 0])
    for mode in ("static", "monolithic"):
        result = simulate(trace, make_timing(), make_settings(mode=mode, store_answers=True))
        assert result.hit_tokens_dram[1] == 40, mode
        without = simulate(trace, make_timing(), make_settings(mode=mode))
        assert without.hit_tokens_dram[1] == 20, mode


def test_answers_nobody_continues_take_room_all_the_same() -> None:
    result = run([(0.0, 20, 21, names("a", 2))], store_answers=True)
    assert result.dram.used_bytes == 4 * BLOCK_BYTES
    assert run([(0.0, 20, 21, names("a", 2))]).dram.used_bytes == 2 * BLOCK_BYTES


# Monolithic instances


def test_a_prompt_shares_steps_with_decodes() -> None:
    """The first decodes from 0.010 on, at 10 ms a step; the second comes at 0.025 and joins the step that begins at
    0.030, where a step of 40 prompt tokens and one decode takes 50 ms."""
    rows = [(0.0, 10, 10, ["a"]), (0.025, 40, 2, names("b", 4))]
    result = run(rows, mode="monolithic", max_batch_tokens=1000)
    assert is_at(result.prefill_start_s, 0.0, 0.030)
    assert is_at(result.first_token_s, 0.010, 0.080)
    # Three tokens by 0.080, and one step for both; then the first goes on alone.
    assert is_at(result.end_s, 0.080 + 6 * 0.010, 0.090)


def test_a_long_prompt_takes_several_steps() -> None:
    """20 tokens a step, one of them a decode's."""
    rows = [(0.0, 10, 5, ["a"]), (0.010, 38, 1, names("b", 4))]
    result = run(rows, mode="monolithic", max_batch_tokens=20, max_running_requests=10)
    assert is_at(result.first_token_s, 0.010, 0.010 + 2 * (0.010 + 0.019))
    assert is_at(result.end_s, 0.010 + 2 * (0.010 + 0.019) + 2 * 0.010, 0.068)


def test_others_decode_while_a_prefix_is_fetched() -> None:
    rows = [(0.0, 100, 1, names("a", 10)), (1.0, 10, 30, ["c"]), (1.053, 100, 1, [*names("a", 9), "b"])]
    result = run(rows, mode="monolithic", dram_read_bytes_per_s=1.5e6)
    # It is begun at 1.060. 90,000 bytes take 60 ms, and a step of 10 tokens and a decode 20 ms: the step may begin
    # 0.015 + 0.75 * (0.060 - 0.020) = 0.045 later, at 1.105, and does when the one that runs then has ended.
    assert is_at(result.prefill_start_s[2:], 1.060)
    assert is_at(result.first_token_s[2:], 1.110 + 0.020)
    assert is_at(result.end_s[1:2], 1.010 + 28 * 0.010 + 0.020)
