from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.hosted_slice import LEAST_TOKENS, HostedSlice, chunk_tokens


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


def test_the_whole_budget_unless_a_host_has_steps_of_its_own() -> None:
    idle = HostedSlice(None)
    assert idle.most_tokens(512) == 512
    idle.count(512, 0.128, 0.0)
    assert idle.most_tokens(512) == 512
    idle.count(512, 0.128, 0.040)
    assert idle.most_tokens(512) == 160


def test_a_setting_stands_over_the_hosts_steps() -> None:
    hosted = HostedSlice(0.060)
    hosted.count(512, 0.128, 0.0)
    assert hosted.most_tokens(512) == 240
    hosted.count(512, 0.128, 0.040)
    assert hosted.most_tokens(512) == 240


def test_it_follows_what_stages_take() -> None:
    """Whatever it was at first: of ten times as much, less than a hundredth is left after thirty stages."""
    hosted = HostedSlice(0.060)
    for _ in range(20):
        hosted.count(256, 0.640, 0.040)
    assert hosted.most_tokens(512) == LEAST_TOKENS
    for _ in range(30):
        hosted.count(256, 0.064, 0.040)
    assert hosted.most_tokens(512) in (224, 240)
