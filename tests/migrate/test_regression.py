from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from migrate.regression import Regression

ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from([0.0, 100.0, 250.0]), st.floats(-3, 3)), min_size=1, max_size=12
)


def summed(rows: list[tuple[float, float, float]]) -> Regression:
    regression = Regression(2)
    for one, two, output in rows:
        regression.add(one, two, output=output)
    return regression


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_it_is_the_best_fit_without_negative_weights(rows: list[tuple[float, float, float]]) -> None:
    inputs = np.array([(1.0, one, two) for one, two, _ in rows])
    outputs = np.array([output for *_, output in rows])
    weights = summed(rows).fit()
    assert all(weight >= 0 for weight in weights)
    _, least = nnls(inputs, outputs)
    assert np.linalg.norm(inputs @ weights - outputs) == pytest.approx(least, abs=1e-5)


def test_a_law_is_found_whatever_the_scale_of_its_inputs() -> None:
    rows = [(float(one), 1e6 * two, 3.0 + 0.5 * one + 2e-7 * 1e6 * two) for one in range(4) for two in range(4)]
    assert summed(rows).fit() == pytest.approx((3.0, 0.5, 2e-7))


def test_inputs_that_go_together_share_what_they_cost() -> None:
    # Always 4 of the first and a constant 1: 8 s a sample. However it is shared, the sum is right.
    constant, each, other = summed([(4.0, 0.0, 8.0)] * 5).fit()
    assert constant + 4 * each == pytest.approx(8.0)
    assert constant > 0
    assert each > 0
    assert other == 0


def test_without_samples_everything_is_nothing() -> None:
    regression = Regression(2)
    assert (regression.fit(), regression.count, regression.mean(1)) == ((0.0, 0.0, 0.0), 0, 0)


def test_sums_add_up_come_apart_and_fade() -> None:
    early = [(1.0, 0.0, 5.0), (2.0, 100.0, 1.0)]
    late = [(0.0, 250.0, 2.0), (3.0, 0.0, 9.0), (1.0, 100.0, 4.0)]
    both = summed(early + late)
    assert summed(early).plus(summed(late)).fit() == pytest.approx(both.fit())
    assert both.plus(summed(early), -1.0).fit() == pytest.approx(summed(late).fit())
    assert (both.count, both.mean(1), both.mean(2)) == (5, pytest.approx(1.4), pytest.approx(90))
    products = [both.mean_product(one, other) for one, other in ((0, 0), (0, 2), (1, 1), (1, 2), (2, 2))]
    assert products == pytest.approx([1, 90, 3, 60, (100**2 + 250**2 + 100**2) / 5])
    # Half of the early ones, as one sample each of two alike.
    twice_late = summed(early + late + late)
    assert summed(early).scaled(0.5).plus(summed(late)).fit() == pytest.approx(twice_late.fit())
