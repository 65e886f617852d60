from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.paired_ratio import paired_ratio


def test_the_median_of_the_ratios_not_the_ratio_of_the_medians() -> None:
    ratio = paired_ratio([(1.0, 2.0), (10.0, 10.0), (100.0, 150.0)])
    assert ratio is not None
    assert ratio.median == 1.5
    assert (ratio.low, ratio.high, ratio.pairs) == (1.0, 2.0, 3)
    assert ratio.coverage == 0.75


# Ranks and coverages of the sign-test interval, as tabulated (for n = 10: x(2) to x(9), 97.85 %).
@pytest.mark.parametrize(
    ("pairs", "rank", "coverage"),
    [(1, 1, 0.0), (2, 1, 0.5), (5, 1, 0.9375), (6, 1, 0.96875), (9, 2, 0.9609), (10, 2, 0.9785), (20, 6, 0.9586)],
)
def test_the_interval_is_the_tabulated_one(pairs: int, rank: int, coverage: float) -> None:
    ratio = paired_ratio([(1.0, float(number)) for number in range(1, pairs + 1)])
    assert ratio is not None
    assert (ratio.low, ratio.high) == (float(rank), float(pairs + 1 - rank))
    assert ratio.coverage == pytest.approx(coverage, abs=5e-5)


@pytest.mark.parametrize("pairs", range(1, 11))
def test_coverage_is_the_share_of_all_sign_patterns_in_which_the_interval_holds_the_median(pairs: int) -> None:
    ratio = paired_ratio([(1.0, float(number)) for number in range(1, pairs + 1)])
    assert ratio is not None
    rank = int(ratio.low)
    # Each ratio lies above or below the true median with the same probability, whatever the distribution.
    held = sum(rank <= sum(pattern) <= pairs - rank for pattern in itertools.product((0, 1), repeat=pairs))
    assert ratio.coverage == pytest.approx(held / 2**pairs)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        ratio = paired_ratio([(1.0, rng.lognormvariate(0.0, 0.5)) for _ in range(12)])
        assert ratio is not None
        assert ratio.coverage >= 0.95
        held += ratio.low <= 1.0 <= ratio.high
    assert held / 2000 == pytest.approx(0.9614, abs=0.015)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=30))
def test_swapping_the_sides_inverts_the_interval(pairs: list[tuple[float, float]]) -> None:
    ratio, inverse = paired_ratio(pairs), paired_ratio([(other, baseline) for baseline, other in pairs])
    assert ratio is not None
    assert inverse is not None
    assert inverse.low == pytest.approx(1 / ratio.high)
    assert inverse.high == pytest.approx(1 / ratio.low)
    assert ratio.low <= ratio.median <= ratio.high


def test_pairs_without_a_ratio_are_left_out() -> None:
    assert paired_ratio([]) is None
    assert paired_ratio([(0.0, 1.0)]) is None
    ratio = paired_ratio([(0.0, 1.0), (2.0, 1.0)])
    assert ratio is not None
    assert (ratio.pairs, ratio.median) == (1, 0.5)
