"""From measured times of an engine's steps to the coefficients of `Timing`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from tuning.hardware_profile import DecodeFit, FitError, MeasuredTiming, PrefillFit
from tuning.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """A step that computed these chunks of prompts, `(new tokens, tokens cached before them)`, and nothing else."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """A step that computed one token for each of `batch` sequences, which together attended to `context_tokens`."""

    batch: int
    context_tokens: int
    seconds: float


def fit_timing(
    prefill: Sequence[PrefillSample], decode: Sequence[DecodeSample], *, model: ModelShape, machine: str, date: str
) -> MeasuredTiming:
    """The coefficients that fit best: least squares of the error relative to each measured time.

    As DistServe fits its estimator, so that short steps count as much as long ones. None may be negative (ours), so
    that more work never takes less time.

    Args:
        prefill, decode: four or more samples each, over as many sizes as will be asked about.
        model: what was measured; its name and dtype are kept.
        machine, date: where and when (YYYY-MM-DD) it was measured.

    Raises:
        ValueError: too few samples, a time that is not above 0, or samples that differ too little to tell the
            coefficients apart.
    """
    (base_s, token_s, square_s), error = _fit(
        [
            (sum(new for new, _ in sample.chunks), sum(new * (2 * cached + new) for new, cached in sample.chunks))
            for sample in prefill
        ],
        [sample.seconds for sample in prefill],
        "prefill samples: vary the number of tokens, and how they are split among prompts",
    )
    prefill_fit = PrefillFit(base_s, token_s, square_s, error)
    (base_s, context_token_s, row_s), error = _fit(
        [(sample.context_tokens, sample.batch) for sample in decode],
        [sample.seconds for sample in decode],
        "decode samples: vary the batch, and the context at the same batch",
    )
    decode_fit = DecodeFit(base_s, context_token_s, row_s, error)
    return MeasuredTiming(model.name, model.dtype_bytes, machine, date, prefill_fit, decode_fit)


def _fit(
    work: Sequence[tuple[int, int]], seconds: Sequence[float], what: str
) -> tuple[tuple[float, float, float], FitError]:
    """Coefficients of 1 and of the two amounts of work, and how far the times they give are off."""
    if len(work) < 4:
        raise ValueError(f"{len(work)} {what}; give 4 or more, so that the fit's error means something")
    for time_s in seconds:
        if not 0 < time_s < math.inf:
            raise ValueError(f"a measured time is {time_s!r}: give finite times above 0")
    rows = np.column_stack([np.ones(len(work)), np.asarray(work, dtype=np.float64)])
    relative: NDArray[np.float64] = rows / np.asarray(seconds, dtype=np.float64)[:, np.newaxis]
    scales = np.linalg.norm(relative, axis=0)
    if not scales.all() or np.linalg.matrix_rank(relative / scales, tol=1e-6) < 3:
        raise ValueError(f"the coefficients can't be told apart by these {what}")
    scaled, _ = nnls(relative / scales, np.ones(len(work)))
    coefficients = scaled / scales
    off = np.abs(relative @ coefficients - 1.0)
    first, second, third = (float(value) for value in coefficients)
    return (first, second, third), FitError(mean=float(off.mean()), worst=float(off.max()), samples=len(work))
