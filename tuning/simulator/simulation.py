"""One run of a trace through a deployment."""

from __future__ import annotations

from tuning.simulator.monolithic_flow import MonolithicFlow
from tuning.simulator.result import SimulationResult, collect
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.static_flow import StaticFlow
from tuning.simulator.step_timing import StepTiming
from tuning.trace.trace import Trace


def simulate(trace: Trace, timing: StepTiming, settings: SimulationSettings) -> SimulationResult:
    """What each request of `trace` would have seen. Same arguments, same result; none of them is changed.

    Args:
        timing: of one instance; all are alike.

    Raises:
        ValueError: the policy names a block that the trace has not got, or the weights leave no room for KV.
    """
    if settings.mode == "static":
        static = StaticFlow(trace, timing, settings)
        num_events = static.events.run(trace.arrival_s.tolist(), static.arrive)
        return collect(trace, static, [*static.prefill, *static.decode], num_events)
    monolithic = MonolithicFlow(trace, timing, settings)
    num_events = monolithic.events.run(trace.arrival_s.tolist(), monolithic.arrive)
    return collect(trace, monolithic, monolithic.instances, num_events)
