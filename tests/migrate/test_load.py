from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.load import RateEstimate, WorkerLoad

LOAD = WorkerLoad(
    worker_id="p0",
    epoch=1,
    role="prefill",
    total_blocks=100,
    live_blocks=40,
    running_requests=2,
    waiting_requests=3,
    pending_prefill_tokens=700,
    prefill_tokens_per_s=1000.0,
    steps=9,
)


def test_a_report_survives_the_wire_and_cannot_be_changed() -> None:
    assert pickle.loads(pickle.dumps(LOAD)) == LOAD
    with pytest.raises(dataclasses.FrozenInstanceError):
        LOAD.steps = 10  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("live_blocks", -1),
        ("pending_prefill_tokens", -5),
        ("steps", -1),
        ("from_this_ingress_requests", -1),
        ("prefill_tokens_per_s", 0.0),
        ("prefill_tokens_per_s", float("nan")),
        ("prefill_tokens_per_s", float("inf")),
        ("role", "decoder"),
    ],
)
def test_impossible_reports_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(LOAD, **{field: value})


def test_rate_starts_at_the_prior() -> None:
    assert RateEstimate(800.0, 4096.0).per_s == pytest.approx(800.0)


def test_prior_has_half_its_weight_after_one_half_life() -> None:
    estimate = RateEstimate(1000.0, 2048.0)
    estimate.update(2048, 2048 / 4000.0)
    # Half of 1 ms a token and half of 0.25 ms a token.
    assert estimate.per_s == pytest.approx(1 / (0.5 * 0.001 + 0.5 * 0.00025))


@given(
    chunks=st.lists(st.integers(1, 4000), min_size=1, max_size=20),
    tokens_per_s=st.floats(600.0, 50_000.0),
)
def test_the_way_a_prompt_is_cut_does_not_matter(chunks: list[int], tokens_per_s: float) -> None:
    whole, cut = RateEstimate(1000.0, 2048.0), RateEstimate(1000.0, 2048.0)
    whole.update(sum(chunks), sum(chunks) / tokens_per_s)
    for chunk in chunks:
        cut.update(chunk, chunk / tokens_per_s)
    assert cut.per_s == pytest.approx(whole.per_s, rel=1e-6)


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-4, 1e-3)), min_size=1, max_size=20))
def test_estimate_is_the_weighted_mean_written_out(samples: list[tuple[int, float]]) -> None:
    estimate = RateEstimate(1 / 6e-4, 1000.0)
    pace = [6e-4]
    weight = [1.0]
    for tokens, s_per_token in samples:
        estimate.update(tokens, tokens * s_per_token)
        kept = 2.0 ** (-tokens / 1000.0)
        weight = [w * kept for w in weight] + [1.0 - kept]
        limit = 2 * sum(w * p for w, p in zip([w / kept for w in weight[:-1]], pace, strict=True))
        pace.append(min(s_per_token, limit))
    assert 1 / estimate.per_s == pytest.approx(sum(w * p for w, p in zip(weight, pace, strict=True)))


def test_a_cold_first_step_does_not_distort() -> None:
    estimate = RateEstimate(1000.0, 4096.0)
    estimate.update(16, 1.6)  # a hundred times slower than the prior
    assert estimate.per_s == pytest.approx(1000.0, rel=0.01)


@given(st.integers(1, 4096), st.floats(1e-9, 1e9))
def test_over_one_half_life_it_moves_by_no_more_than_a_factor_of_two(tokens: int, seconds: float) -> None:
    estimate = RateEstimate(1000.0, 4096.0)
    estimate.update(tokens, seconds)
    assert 500.0 <= estimate.per_s <= 2000.0 * (1 + 1e-9)


@pytest.mark.parametrize("true_rate", [10.0, 100_000.0])
def test_a_prior_wrong_by_a_hundred_is_overcome(true_rate: float) -> None:
    estimate = RateEstimate(1000.0, 2048.0)
    for _ in range(200):
        estimate.update(256, 256 / true_rate)
    assert estimate.per_s == pytest.approx(true_rate, rel=0.01)


def test_steps_that_say_nothing_change_nothing() -> None:
    estimate = RateEstimate(1000.0, 2048.0)
    estimate.update(0, 3.0)
    estimate.update(64, 0.0)
    assert estimate.per_s == pytest.approx(1000.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_impossible_samples_are_refused(tokens: int, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        RateEstimate(1000.0, 2048.0).update(tokens, seconds)


@pytest.mark.parametrize(("prior", "half_life"), [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))])
def test_impossible_settings_are_refused(prior: float, half_life: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        RateEstimate(prior, half_life)
