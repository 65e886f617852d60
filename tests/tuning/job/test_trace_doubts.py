"""What is said of traces that are a poor ground, against what the simulator does with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tuning.hardware_profile import HardwareProfile, read_hardware
from tuning.job.job_error import JobError
from tuning.job.trace_doubts import trace_doubts
from tuning.model_config import read_model_shape
from tuning.simulator.settings import Mode, SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.trace import Trace

MODEL = read_model_shape("llama-3.1-8b")
A100 = read_hardware("a100-80g")
TRACE = generate(SyntheticTraffic(3, 150, requests_per_s=8.0, prefixes=8, turns=3.0, think_s=10.0))
PATH = Path("trace.jsonl")


def with_room_for(tokens: int) -> HardwareProfile:
    """A device with so many tokens of KV beside the weights."""
    num_bytes = MODEL.weight_bytes + tokens * MODEL.kv_bytes_per_token
    return replace(A100, memory_bytes=num_bytes, memory_share=1.0)


def lifetimes(trace: Trace) -> np.ndarray:
    return trace.input_tokens + np.maximum(trace.output_tokens, 1) - 1


@pytest.mark.parametrize("mode", ["monolithic", "static"])
@pytest.mark.parametrize("quantile", [0.6, 0.9, 0.99, 1.0])
def test_the_requests_that_are_said_to_be_refused_are_those_that_the_simulator_refuses(
    mode: Mode, quantile: float
) -> None:
    timing = Timing(MODEL, with_room_for(int(np.quantile(lifetimes(TRACE), quantile)) + 15))
    refused = simulate(TRACE, timing, SimulationSettings(mode=mode)).refused
    doubts = trace_doubts(PATH, TRACE, timing)
    if not refused:
        assert quantile == 1.0
        assert doubts == []
        return
    (doubt,) = doubts
    assert doubt.startswith(f"trace.jsonl: {len(refused)} of 150 requests need more KV than a100-80g has room for")
    assert f"the largest needs {lifetimes(TRACE).max():,}. They are refused, and no figure counts them" in doubt


def test_a_device_that_refuses_more_than_half_is_refused_itself() -> None:
    timing = Timing(MODEL, with_room_for(int(np.quantile(lifetimes(TRACE), 0.3))))
    with pytest.raises(JobError, match=r"need more KV than a100-80g has room for .* or a larger device"):
        trace_doubts(PATH, TRACE, timing)


def test_few_requests_are_said_to_be_few() -> None:
    timing = Timing(MODEL, A100)
    assert trace_doubts(PATH, TRACE.head(100), timing) == []
    (doubt,) = trace_doubts(PATH, TRACE.head(99), timing)
    assert doubt.startswith("trace.jsonl: 99 requests say little")


def test_where_those_that_are_too_long_make_the_99th_percentile_it_is_said() -> None:
    lengths = np.sort(TRACE.input_tokens + TRACE.output_tokens)
    for num_longer, said in ((1, False), (2, True)):  # of 150
        model = replace(MODEL, max_context_tokens=int(lengths[-num_longer - 1]))
        (doubt,) = trace_doubts(PATH, TRACE, Timing(model, A100))
        assert doubt.startswith(f"trace.jsonl: {num_longer} of 150 requests are longer")
        assert ("99th percentiles may be theirs alone: leave them out of the trace to see" in doubt) == said
