"""A deployment that falls behind, told from one that keeps up: what a trace of twice the length does to its waits."""

from __future__ import annotations

import pytest

from tuning.hardware_profile import read_hardware
from tuning.job.falls_behind import falls_behind
from tuning.model_config import read_model_shape
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.trace import Trace

TIMING = Timing(read_model_shape("llama-3.1-8b"), read_hardware("a100-80g"))
TRACE = generate(SyntheticTraffic(3, 1200, requests_per_s=8.0, prefixes=8, turns=1.0, new_tokens=2000))


def ttft_and_said(trace: Trace) -> tuple[float, list[str]]:
    figures = simulate(trace, TIMING, SimulationSettings(mode="monolithic")).summary()
    return figures["ttft_mean_s"], falls_behind(float(trace.arrival_s[-1]), figures)


@pytest.mark.parametrize(("rate_factor", "behind"), [(0.1, False), (0.2, False), (2.0, True)])
def test_it_is_said_of_a_deployment_whose_waits_grow_with_the_trace(rate_factor: float, behind: bool) -> None:
    short_s, said_of_short = ttft_and_said(TRACE.head(600).scaled(rate_factor))
    long_s, said = ttft_and_said(TRACE.scaled(rate_factor))
    assert (long_s > 1.5 * short_s) == behind
    assert bool(said) == bool(said_of_short) == behind
    if behind:
        assert f"wait {long_s:,.0f} s on average" in said[0]
        assert "give more instances, or a smaller --rate-factor" in said[0]


def test_nothing_is_said_where_all_come_at_once_or_nothing_was_served() -> None:
    assert falls_behind(0.0, {"ttft_mean_s": 9.0, "makespan_s": 20.0}) == []
    assert falls_behind(10.0, {"ttft_mean_s": None, "makespan_s": 20.0}) == []
