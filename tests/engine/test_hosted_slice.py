from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.hosted_slice import LEAST_TOKENS, MOST_COST, TRIES, HostedSlice, chunk_tokens


def test_a_chunk_takes_as_long_as_it_may() -> None:
    # 60 ms at 0.25 ms a token are 240 tokens; at 0.23 ms 260, and 256 in whole tiles of 16.
    assert chunk_tokens(0.060, 0.25e-3, 512) == 240
    assert chunk_tokens(0.060, 0.23e-3, 512) == 256
    assert chunk_tokens(0.060, 0.25e-3, 200) == 200
    assert chunk_tokens(0.001, 0.25e-3, 512) == LEAST_TOKENS
    assert chunk_tokens(0.060, 0.0, 500) == 500


@given(slice_s=st.floats(1e-6, 10), token_s=st.floats(0, 1), more=st.floats(1, 100), budget=st.integers(1, 100_000))
def test_more_time_is_never_a_shorter_chunk(slice_s: float, token_s: float, more: float, budget: int) -> None:
    tokens = chunk_tokens(slice_s, token_s, budget)
    assert min(budget, LEAST_TOKENS) <= tokens <= budget
    assert tokens <= chunk_tokens(slice_s * more, token_s, budget)
    assert tokens >= chunk_tokens(slice_s, token_s * more, budget)


def run(hosted: HostedSlice, curve: Callable[[int], float], host_step_s: float, steps: int = 60) -> list[int]:
    """Sizes of steps that are as large as they may be, where a stage of n tokens takes `curve(n)`."""
    sizes = []
    for _ in range(steps):
        sizes.append(hosted.most_tokens())
        hosted.count(sizes[-1], curve(sizes[-1]), host_step_s)
    return sizes


def kernels(num_tokens: int) -> float:
    """0.30 ms a token from 256 tokens on, 0.52 below: a third of the layers, 0.1 and 0.17."""
    return num_tokens * (0.10e-3 if num_tokens >= 256 else 0.17e-3)


def linear(num_tokens: int) -> float:
    return num_tokens * 0.10e-3


def test_the_whole_budget_unless_a_host_has_steps_of_its_own() -> None:
    assert set(run(HostedSlice(None, 512), kernels, 0.0)) == {512}


def test_the_whole_budget_where_its_stage_takes_no_longer_than_the_hosts_step() -> None:
    assert set(run(HostedSlice(None, 512), kernels, 0.060)) == {512}


def test_chunks_are_halved_until_they_take_as_long_as_the_hosts_step() -> None:
    sizes = run(HostedSlice(None, 512), linear, 0.015)  # 51 ms, 26 ms, 13 ms
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 128
    assert run(HostedSlice(None, 512), linear, 0.001)[-1] == LEAST_TOKENS


def test_chunks_are_not_so_short_that_a_token_costs_much_more() -> None:
    """By hand: a token of 128 takes 1.7 times as long as one of 256. It is run as often as it takes to know that."""
    sizes = run(HostedSlice(None, 512), kernels, 0.015)
    assert sizes[-1] == 256
    assert sizes.count(128) == TRIES


@given(
    token_s=st.lists(st.floats(1e-5, 1e-3), min_size=4, max_size=4),
    host_step_s=st.floats(1e-3, 1.0),
)
def test_what_a_token_costs_is_bounded_whatever_the_sizes_cost(token_s: list[float], host_step_s: float) -> None:
    costs = dict(zip((512, 256, 128, 64), token_s, strict=True))
    sizes = run(HostedSlice(None, 512), lambda size: size * costs[size], host_step_s)
    settled = sizes[-1]
    assert set(sizes[5 * TRIES :]) == {settled}
    tried = set(sizes)
    assert settled == 512 or costs[settled] <= MOST_COST * min(costs[size] for size in tried)
    # It could be shorter only where that costs too much, or is of no use to the host.
    assert settled == 64 or costs[settled] * settled <= host_step_s or settled // 2 in tried


def test_prompts_that_do_not_fill_a_size_are_judged_by_what_they_fill() -> None:
    hosted = HostedSlice(None, 512)
    for _ in range(TRIES):
        assert hosted.most_tokens() == 512
        hosted.count(200, linear(200), 0.015)
    assert hosted.most_tokens() == 128
    longer = HostedSlice(None, 512)
    for _ in range(TRIES):
        longer.count(200, linear(200), 0.030)
    assert longer.most_tokens() == 512


def test_one_stage_that_waited_for_its_core_changes_nothing() -> None:
    hosted = HostedSlice(None, 512)
    assert run(hosted, kernels, 0.015)[-1] == 256
    hosted.count(256, 3.0, 0.015)
    assert hosted.most_tokens() == 256


def test_a_budget_below_the_least_is_one_size() -> None:
    assert set(run(HostedSlice(None, 48), linear, 0.001)) == {48}


def test_a_setting_stands_over_the_hosts_steps_and_what_a_token_costs() -> None:
    hosted = HostedSlice(0.060, 512)
    hosted.count(512, 0.128, 0.0)
    assert hosted.most_tokens() == 240
    hosted.count(512, 0.128, 0.040)
    assert hosted.most_tokens() == 240
    assert run(HostedSlice(0.002, 512), kernels, 0.040)[-1] == LEAST_TOKENS


def test_it_follows_what_stages_take() -> None:
    """Whatever it was at first: of ten times as much, less than a hundredth is left after thirty stages."""
    hosted = HostedSlice(0.060, 512)
    for _ in range(20):
        hosted.count(256, 0.640, 0.040)
    assert hosted.most_tokens() == LEAST_TOKENS
    for _ in range(30):
        hosted.count(256, 0.064, 0.040)
    assert hosted.most_tokens() in (224, 240)
