from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.hardware_profile import MeasuredTiming, read_hardware
from tuning.model_config import read_model_shape
from tuning.timing import Timing
from tuning.timing_fit import DecodeSample, PrefillSample, fit_timing

MODEL = read_model_shape("smollm2-135m")
CHUNKS: list[tuple[tuple[int, int], ...]] = [
    ((16, 0),), ((200, 0),), ((1000, 0),), ((100, 900),), ((64, 0),) * 8, ((30, 0), (500, 500)),
]  # fmt: skip
BATCHES = [(1, 10), (1, 4000), (4, 200), (16, 1000), (16, 9000), (64, 64)]

coefficients = st.tuples(st.floats(1e-4, 1e-1), st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-5))


def prefill_seconds(chunks: tuple[tuple[int, int], ...], base_s: float, token_s: float, square_s: float) -> float:
    """The formula of DistServe's estimator, by whole lengths: sum of squares less those of what was cached."""
    squares = sum((cached + new) ** 2 - cached**2 for new, cached in chunks)
    return base_s + token_s * sum(new for new, _ in chunks) + square_s * squares


@settings(max_examples=50)
@given(prefill=coefficients, decode=coefficients)
def test_exact_samples_give_back_the_coefficients(
    prefill: tuple[float, float, float], decode: tuple[float, float, float]
) -> None:
    fit = fit_timing(
        [PrefillSample(chunks, prefill_seconds(chunks, *prefill)) for chunks in CHUNKS],
        [DecodeSample(b, c, decode[0] + decode[1] * b + decode[2] * c) for b, c in BATCHES],
        model=MODEL,
        machine="none",
        date="2026-11-29",
    )
    assert (fit.prefill.base_s, fit.prefill.token_s, fit.prefill.square_s) == pytest.approx(prefill, rel=1e-5)
    assert (fit.decode.base_s, fit.decode.row_s, fit.decode.context_token_s) == pytest.approx(decode, rel=1e-5)
    assert fit.prefill.error.worst < 1e-6
    assert fit.decode.error.worst < 1e-6


def test_the_timing_of_a_fit_gives_the_measured_times() -> None:
    fit = make_fit()
    timing = Timing(MODEL, replace(read_hardware("a100-80g"), measured=(fit,)))
    for chunks in CHUNKS:
        assert timing.step_s(chunks, 0, 0) == pytest.approx(prefill_seconds(chunks, 0.01, 1e-3, 1e-7))
    for batch, context in BATCHES:
        assert timing.decode_step_s(batch, context) == pytest.approx(0.02 + 2e-3 * batch + 1e-6 * context)


def test_errors_are_relative_to_each_sample() -> None:
    # One coefficient is enough: half of the samples take 10 % more and half 10 % less than 1 s or 100 s.
    samples = [
        PrefillSample(((tokens, 0),) * 10, scale * tokens / 10)
        for tokens in (10, 1000)
        for scale in (0.9, 1.1)
        for _ in range(2)
    ] + [PrefillSample(((100, 0),), 1.0), PrefillSample(((10000, 0),), 100.0)]
    fit = fit_timing(samples, decode_samples(), model=MODEL, machine="none", date="2026-11-29")
    assert fit.prefill.error.samples == 10
    # Least squares of absolute errors would let the short ones be off by any share.
    assert fit.prefill.error.worst < 0.25
    assert 0.05 < fit.prefill.error.mean < 0.15


def test_no_coefficient_is_negative() -> None:
    # Times that fall with the batch: the best fit without the bound has a negative slope.
    samples = [DecodeSample(b, c, 1.0 + 1e-4 * c - 0.01 * b) for b, c in BATCHES]
    fit = fit_timing(prefill_samples(), samples, model=MODEL, machine="none", date="2026-11-29")
    assert fit.decode.row_s == 0.0
    assert fit.decode.base_s > 0


def test_name_dtype_machine_and_date_are_kept() -> None:
    fit = make_fit()
    assert (fit.model, fit.dtype_bytes, fit.machine, fit.date) == ("smollm2-135m", 2, "none", "2026-11-29")


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 decode samples: vary the batch.*; give 4 or more"):
        fit_timing(prefill_samples(), decode_samples()[:3], model=MODEL, machine="none", date="2026-11-29")


def test_samples_that_differ_too_little_are_refused() -> None:
    single = [PrefillSample(((100, 0),) * n, 0.1 * n) for n in range(1, 6)]  # squares are 100 times the tokens
    with pytest.raises(ValueError, match="can't be told apart by these prefill samples: vary the number of tokens"):
        fit_timing(single, decode_samples(), model=MODEL, machine="none", date="2026-11-29")
    same = [DecodeSample(4, c, 1.0 + c) for c in range(10, 16)]
    with pytest.raises(ValueError, match="can't be told apart by these decode samples: vary the batch"):
        fit_timing(prefill_samples(), same, model=MODEL, machine="none", date="2026-11-29")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_no_clock_gives_are_refused(seconds: float) -> None:
    samples = [*decode_samples(), DecodeSample(1, 1, seconds)]
    with pytest.raises(ValueError, match="give finite times above 0"):
        fit_timing(prefill_samples(), samples, model=MODEL, machine="none", date="2026-11-29")


def prefill_samples() -> list[PrefillSample]:
    return [PrefillSample(chunks, prefill_seconds(chunks, 0.01, 1e-3, 1e-7)) for chunks in CHUNKS]


def decode_samples() -> list[DecodeSample]:
    return [DecodeSample(batch, context, 0.02 + 2e-3 * batch + 1e-6 * context) for batch, context in BATCHES]


def make_fit() -> MeasuredTiming:
    return fit_timing(prefill_samples(), decode_samples(), model=MODEL, machine="none", date="2026-11-29")
