from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.fetch_rates import PRIOR_BYTES_PER_S, FetchRates
from kv.fetch_choice import FetchRun, tokens_to_fetch
from kv.tiers import Tier

MIB = 1 << 20


def run(tier: Tier = "dram", num_bytes: int = 8 * MIB, num_tokens: int = 100) -> FetchRun:
    return FetchRun(num_tokens, num_bytes, tier)


def settle(rates: FetchRates, tier: Tier, bytes_per_s: float) -> None:
    for _ in range(400):
        rates.fetched([run(tier)], 8 * MIB / bytes_per_s)


@pytest.mark.parametrize("tier", ["dram", "disk"])
def test_what_was_never_measured_is_fetched(tier: Tier) -> None:
    rates = FetchRates(lambda: 20_000.0, step_s=lambda: 0.0)
    # 320 KiB a token, as of a model with 70 billion weights; and a single small block.
    for each in (run(tier, 1000 * 320 * 1024, 1000), run(tier, 16 * 1024, 16)):
        assert tokens_to_fetch([each], rates.costs()) == each.num_tokens


@pytest.mark.parametrize("bytes_per_s", [2e7, 3e9])
def test_the_measured_rate_is_reached_for_the_tier_it_was_measured_on(bytes_per_s: float) -> None:
    rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
    settle(rates, "disk", bytes_per_s)
    assert rates.bytes_per_s() == pytest.approx({"dram": PRIOR_BYTES_PER_S, "disk": bytes_per_s}, rel=0.03)


@given(st.lists(st.tuples(st.sampled_from(["dram", "disk"]), st.integers(1, 64)), min_size=1, max_size=20))
def test_a_fetch_over_several_tiers_is_divided_as_is_known_of_them(amounts: list[tuple[Tier, int]]) -> None:
    rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
    settle(rates, "dram", 4e9)
    settle(rates, "disk", 1e9)
    before = rates.bytes_per_s()
    runs = [run(tier, amount * MIB) for tier, amount in amounts]
    rates.fetched(runs, sum(rates.costs().fetch_s(each) for each in runs))
    assert rates.bytes_per_s() == pytest.approx(before, rel=0.03)


def test_a_tier_that_became_slow_is_declined_and_tried_again_after_a_while() -> None:
    rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
    settle(rates, "disk", 2e7)
    declined = 0
    while tokens_to_fetch([run("disk")], rates.costs()) == 0:  # 0.4 s to fetch, 0.1 s to compute
        rates.declined([run("disk")])
        declined += 1
    assert 10 < declined < 1000


def test_a_fetch_of_nothing_says_nothing() -> None:
    rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
    before = rates.bytes_per_s()
    rates.fetched([], 3.0)
    assert rates.bytes_per_s() == before
