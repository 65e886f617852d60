"""The corner of the simulator that is only a cache: how often prefixes hit in a memory of some size."""

from __future__ import annotations

from typing import Final

from tuning.model_shape import ModelShape
from tuning.simulator.result import SimulationResult
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.simulator.step_timing import InstantTiming
from tuning.trace.trace import PartialBlocks, Trace

_MODEL: Final = ModelShape("none", 1, 1, 1, 1, 1, 1, 1, 1 << 40, dtype_bytes=1)


def simulate_cache(trace: Trace, capacity_blocks: int, partial_blocks: PartialBlocks = "hit") -> SimulationResult:
    """One LRU memory of `capacity_blocks` blocks, and service that takes no time.

    Prompts come in the order of the trace. A block hits when it and all blocks before it are there; the last one of a
    prompt, where it is not full, as `partial_blocks` says. Then each block of the prompt is used, from the first to the
    last, and is there; beyond its size the memory loses what was used longest ago.

    Raises:
        ValueError: the trace has no reuse information, or the capacity is below 0.
    """
    if trace.block_tokens is None:
        raise ValueError(f"trace {trace.name!r} has no reuse information: there is nothing to hit")
    if capacity_blocks < 0:
        raise ValueError(f"capacity_blocks={capacity_blocks} is not allowed: give 0 or more")
    settings = SimulationSettings(
        mode="monolithic",
        local_prefix_cache=False,
        dram_bytes=capacity_blocks * trace.block_tokens * _MODEL.kv_bytes_per_token,
        partial_blocks=partial_blocks,
        store_answers=False,
        touch_order="front_to_back",
        max_batch_tokens=1 << 40,
    )
    return simulate(trace, InstantTiming(_MODEL), settings)
