from __future__ import annotations

import random
from itertools import combinations
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.trend import second_half, trend


def test_a_case_by_hand() -> None:
    # The 15 slopes, sorted: -1 0 1/3 1/2 2/3 2/3 3/4 3/4 4/5 1 1 1 1 3/2 2; the 8th is the median.
    result = trend([(0.0, 0.0), (1.0, 1.0), (2.0, 3.0), (3.0, 2.0), (4.0, 3.0), (5.0, 4.0)])
    assert result is not None
    assert result.slope_per_s == 3 / 4
    # C = 1.96 sqrt(6 * 5 * 17 / 18) = 10.4: from the 2.3rd to the 13.7th, so from the 2nd to the 14th.
    assert (result.low_per_s, result.high_per_s) == (0.0, 3 / 2)


@given(st.lists(st.integers(-1000, 1000), min_size=4, max_size=25))
def test_the_slope_is_the_median_of_all_slopes(values: list[int]) -> None:
    samples = [(float(number), float(value)) for number, value in enumerate(values)]
    result = trend(samples)
    assert result is not None
    assert result.slope_per_s == median((b - a) / (t - s) for (s, a), (t, b) in combinations(samples, 2))
    assert result.low_per_s <= result.slope_per_s <= result.high_per_s


def test_a_line_grows_by_its_slope_and_an_outlier_changes_nothing() -> None:
    samples = [(10.0 + 5.0 * number, 100.0 + 3.0 * (5.0 * number)) for number in range(30)]
    samples[17] = (samples[17][0], 1e9)
    result = trend(samples)
    assert result is not None
    assert result.slope_per_s == pytest.approx(3.0)
    assert result.grows


def test_memory_that_stays_does_not_grow() -> None:
    result = trend([(float(number), 5.0) for number in range(20)])
    assert result is not None
    assert result.slope_per_s == 0.0
    assert not result.grows


def test_noise_is_rarely_called_growth_and_the_interval_mostly_holds_the_truth() -> None:
    rng = random.Random(3)
    held = grows = 0
    for _ in range(400):
        result = trend([(float(number), rng.gauss(0.0, 1.0)) for number in range(30)])
        assert result is not None
        held += result.low_per_s <= 0.0 <= result.high_per_s
        grows += result.grows
    assert held / 400 >= 0.93
    assert grows / 400 <= 0.05


def test_slow_growth_is_found_under_noise() -> None:
    rng = random.Random(4)
    result = trend([(float(number), 0.2 * number + rng.gauss(0.0, 1.0)) for number in range(60)])
    assert result is not None
    assert result.grows
    assert result.low_per_s <= 0.2 <= result.high_per_s


def test_long_series_are_thinned_without_changing_the_slope() -> None:
    result = trend([(float(number), 2.0 * number) for number in range(3000)])
    assert result is not None
    assert result.samples <= 400
    assert result.slope_per_s == pytest.approx(2.0)


def test_too_few_samples_have_no_trend() -> None:
    assert trend([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) is None
    assert trend([(1.0, 1.0)] * 5) is None


def test_the_second_half_is_half_of_the_time() -> None:
    samples = [(0.0, 1.0), (1.0, 1.0), (2.0, 1.0), (8.0, 2.0), (10.0, 2.0)]
    assert second_half(samples) == [(8.0, 2.0), (10.0, 2.0)]
    assert second_half([]) == []
