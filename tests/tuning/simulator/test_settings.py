"""What is refused, and what a trace without reuse information gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.tuning.simulator.tiny import BLOCK_BYTES, is_at, make_settings, make_timing
from tuning.simulator.corner import simulate_cache
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.trace.trace import Trace


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "balanced"}, "mode='balanced' is not allowed: give one of static, monolithic"),
        ({"partial_blocks": "some"}, "give one of miss, hit"),
        ({"dispatch": "nearest"}, "dispatch='nearest' is not allowed"),
        ({"prefill_instances": 0}, "prefill_instances=0 is not allowed: give an int of at least 1"),
        ({"dram_bytes": 1.5e9}, "dram_bytes=1500000000.0 is not allowed"),
        ({"device_pool_blocks": 0}, "device_pool_blocks=0"),
        ({"disk_iops": 0}, "disk_iops=0 is not allowed: give a number above 0"),
        ({"link_bytes_per_s": math.nan}, "link_bytes_per_s=nan"),
        ({"seed": None}, "seed=None"),
        ({"max_batch_tokens": 100}, "each of them takes a token of a step"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimulationSettings(**changes)


def without_reuse() -> Trace:
    return Trace(
        name="lengths",
        arrival_s=np.array([0.0, 1.0]),
        input_tokens=np.array([100, 100]),
        output_tokens=np.array([3, 0]),
        block_tokens=None,
        block_offsets=np.zeros(3, np.int64),
        block_ids=np.zeros(0, np.int64),
        parent_request=np.array([-1, 0]),
        turn=np.ones(2, np.int32),
    )


@pytest.mark.parametrize("mode", ["static", "monolithic"])
def test_lengths_alone_can_be_simulated(mode: str) -> None:
    settings = make_settings(mode=mode, dram_write_bytes_per_s=1e6, local_prefix_cache=True, store_answers=True)
    result = simulate(without_reuse(), make_timing(), settings)
    assert is_at(result.first_token_s, 0.100, 1.100)
    # Apart, all of a prompt is handed over: the last layer is written 25 ms after it was computed.
    assert is_at(result.end_s, 0.145 if mode == "static" else 0.120, 1.100)
    assert result.hit_blocks == 0


def test_they_have_no_hit_ratio() -> None:
    with pytest.raises(ValueError, match="no reuse information"):
        simulate_cache(without_reuse(), 10)


def test_the_pool_is_what_fits_beside_the_weights() -> None:
    """From the timing, where no setting says otherwise: too small here for 10 blocks, as for 1 MiB less the weights."""
    timing = make_timing()
    result = simulate(without_reuse(), timing, make_settings(device_pool_blocks=None))
    assert result.instances[0].pool_blocks == timing.kv_pool_tokens() // 16
    assert result.dram.capacity_bytes == 100 * BLOCK_BYTES // 16_000 * 16_000
