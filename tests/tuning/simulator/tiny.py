"""Traces and timings small enough to work out by hand.

A block is 10 tokens of 1,000 bytes. A prompt token takes 1 ms to compute, a decode step 10 ms whatever its batch, and
the model has 4 layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tuning.hardware_profile import DecodeFit, FitError, HardwareProfile, MeasuredTiming, PrefillFit
from tuning.model_shape import ModelShape
from tuning.simulator.result import SimulationResult
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.trace import Trace

BLOCK_TOKENS = 10
BLOCK_BYTES = 10_000
MODEL = ModelShape("tiny", 4, 8, 8, 1, 1, 125, 16, 1 << 20, dtype_bytes=1)

Row = tuple[float, int, int, Sequence[str]]
"""Arrival, prompt tokens, answer's tokens, and a name for each block: equal names, equal prefixes."""


def make_timing(
    *, token_s: float = 0.001, step_s: float = 0.01, row_s: float = 0.0, context_token_s: float = 0.0
) -> Timing:
    """The times above, or others."""
    error = FitError(0.0, 0.0, 1)
    measured = MeasuredTiming(
        MODEL.name,
        MODEL.dtype_bytes,
        "none",
        "2026-01-01",
        PrefillFit(0.0, token_s, 0.0, error),
        DecodeFit(step_s, context_token_s, row_s, error),
    )
    return Timing(MODEL, HardwareProfile("tiny", 1.0, 1 << 20, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, (measured,)))


def make_trace(rows: Sequence[Row], parents: Sequence[int] = ()) -> Trace:
    """A trace of blocks of 10 tokens; ids are given out by first appearance."""
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(name, len(numbers)) for row in rows for name in row[3]]
    return Trace(
        name="tiny",
        arrival_s=np.array([row[0] for row in rows], np.float64),
        input_tokens=np.array([row[1] for row in rows], np.int64),
        output_tokens=np.array([row[2] for row in rows], np.int64),
        block_tokens=BLOCK_TOKENS,
        block_offsets=np.array([0, *itertools.accumulate(len(row[3]) for row in rows)], np.int64),
        block_ids=np.array(ids, np.int64),
        parent_request=np.array(parents or [-1] * len(rows), np.int64),
        turn=np.ones(len(rows), np.int32),
    )


def names(prefix: str, count: int) -> list[str]:
    """Blocks `prefix0`, `prefix1` and so on."""
    return [f"{prefix}{number}" for number in range(count)]


def make_settings(**changes: Any) -> SimulationSettings:
    """One prefill and one decode instance with all the room they want, no local prefixes, 100 blocks of DRAM."""
    values: dict[str, Any] = {
        "device_pool_blocks": 1000,
        "local_prefix_cache": False,
        "dram_bytes": 100 * BLOCK_BYTES,
        "store_answers": False,
    }
    return SimulationSettings(**(values | changes))


def run(rows: Sequence[Row], **changes: Any) -> SimulationResult:
    """Simulate such a trace with the figures above, and `make_settings` of `changes`."""
    return simulate(make_trace(rows), make_timing(), make_settings(**changes))


def is_at(times_s: Any, *expected_s: float) -> bool:
    """Whether times are as expected, to the microsecond."""
    return bool(np.abs(np.asarray(times_s) - np.array(expected_s)).max() < 1e-6)


@st.composite
def traces(draw: st.DrawFn, max_requests: int = 20, max_blocks: int = 8) -> Trace:
    """Traces of prompts that share prefixes: walks down a small tree. Many arrive at equal times."""
    rows: list[Row] = []
    now_s = 0.0
    for _ in range(draw(st.integers(1, max_requests))):
        path = draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=max_blocks))
        chain = ["".join(path[: depth + 1]) for depth in range(len(path))]
        missing = draw(st.integers(0, BLOCK_TOKENS - 1))
        rows.append((now_s, len(chain) * BLOCK_TOKENS - missing, draw(st.integers(0, 30)), chain))
        now_s += draw(st.sampled_from([0.0, 0.0, 0.013, 0.2]))
    parents = [draw(st.integers(-1, row - 1)) for row in range(len(rows))]
    return make_trace(rows, parents)
