"""What holds for every trace and deployment."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.policy.admission import DiskAdmission
from kv.policy.policy_file import PolicySpec
from migrate.dispatch import POLICIES
from tests.tuning.simulator.tiny import BLOCK_BYTES, MODEL, make_timing, traces
from tuning.simulator.result import SimulationResult
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.simulation import simulate
from tuning.simulator.step_timing import InstantTiming
from tuning.timing import Timing
from tuning.trace.trace import Trace

RATES = st.sampled_from([float("inf"), 3e6, 1e5])


@st.composite
def deployments(draw: st.DrawFn) -> SimulationSettings:
    """Of either mode, with pools that are sometimes too small for a prompt."""
    return SimulationSettings(
        mode=draw(st.sampled_from(["static", "monolithic"])),
        prefill_instances=draw(st.integers(1, 2)),
        decode_instances=draw(st.integers(1, 2)),
        monolithic_instances=draw(st.integers(1, 2)),
        device_pool_blocks=draw(st.integers(5, 30)),
        local_prefix_cache=draw(st.booleans()),
        link_bytes_per_s=draw(RATES),
        dram_bytes=draw(st.integers(0, 12)) * BLOCK_BYTES,
        dram_read_bytes_per_s=draw(RATES),
        dram_write_bytes_per_s=draw(RATES),
        disk_bytes=draw(st.sampled_from([0, 5, 40])) * BLOCK_BYTES,
        disk_read_bytes_per_s=draw(RATES),
        disk_write_bytes_per_s=draw(RATES),
        disk_iops=draw(st.sampled_from([float("inf"), 100.0])),
        disk_write_queue_bytes=draw(st.sampled_from([3, 1000])) * BLOCK_BYTES,
        disk_admission=draw(st.sampled_from(DiskAdmission)),
        policy=PolicySpec(draw(st.sampled_from(["lru", "lfu"])), draw(st.sampled_from([None, 0.05, 1.0]))),
        dispatch=draw(st.sampled_from(sorted(POLICIES))),
        partial_blocks=draw(st.sampled_from(["miss", "hit"])),
        max_batch_tokens=draw(st.sampled_from([20, 1000])),
        max_running_requests=draw(st.sampled_from([1, 3, 20])),
        prefetch=draw(st.booleans()),
        store_answers=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def timing() -> Timing:
    return make_timing(row_s=0.001, context_token_s=0.00001)


def arrays_of(result: SimulationResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in result.__slots__}


@settings(max_examples=100, deadline=None)
@given(trace=traces(), deployment=deployments())
def test_nothing_is_lost(trace: Trace, deployment: SimulationSettings) -> None:
    result = simulate(trace, timing(), deployment)
    done = np.ones(len(trace), np.bool_)
    done[list(result.refused)] = False
    # Requests.
    assert np.isnan(result.end_s[~done]).all()
    for earlier, later in itertools.pairwise(
        (result.arrival_s, result.admitted_s, result.prefill_start_s, result.first_token_s, result.end_s)
    ):
        assert (earlier[done] <= later[done]).all()
    # Tokens.
    parts = result.hit_tokens_device + result.hit_tokens_dram + result.hit_tokens_disk + result.computed_tokens
    assert parts[done].tolist() == trace.input_tokens[done].tolist()
    assert result.gap_count.sum() == (result.output_tokens[done] - 1).sum()
    wanted_s = (result.end_s - result.first_token_s)[done].sum()
    assert result.gap_s @ result.gap_count == pytest.approx(wanted_s)
    # Blocks.
    for tier in (result.dram, result.disk):
        held = tier.inserted_blocks - tier.evicted_blocks - tier.expired_blocks
        assert held * BLOCK_BYTES == tier.used_bytes <= tier.peak_bytes <= tier.capacity_bytes
    for instance in result.instances:
        assert instance.peak_held_blocks <= instance.pool_blocks
    # Bytes.
    moved = result.moved
    assert result.dram.read_bytes == moved.dram_fetched + moved.dram_handed_over + moved.dram_to_disk
    assert result.disk.written_bytes == moved.dram_to_disk
    assert result.disk.read_bytes == moved.disk_fetched + moved.disk_prefetched >= moved.dram_promoted
    assert result.dram.written_bytes == moved.dram_stored
    assert sum(i.link_in_bytes for i in result.instances) == moved.dram_fetched + moved.dram_handed_over
    assert sum(i.link_out_bytes for i in result.instances) == moved.dram_stored
    stored_tokens = result.hit_tokens_dram.sum() + result.hit_tokens_disk.sum()
    fetched = result.hit_tokens_dram + result.hit_tokens_disk > 0
    # A hit is of whole blocks, less the last token of a prompt that is all there, or what a partial block lacks.
    assert 0 <= moved.dram_fetched // 1000 - stored_tokens <= 10 * fetched.sum()


@settings(max_examples=100, deadline=None)
@given(trace=traces(), deployment=deployments())
def test_littles_law(trace: Trace, deployment: SimulationSettings) -> None:
    """The mean number in the system is the rate times the mean time there, counted by separate means."""
    result = simulate(trace, timing(), deployment)
    seconds = (result.end_s - result.arrival_s)[~np.isnan(result.end_s)]
    if not len(seconds) or result.makespan_s == 0:
        return
    mean_number = result.request_s / result.makespan_s
    rate = len(seconds) / result.makespan_s
    assert mean_number == pytest.approx(rate * seconds.mean())


@settings(max_examples=50, deadline=None)
@given(trace=traces(), deployment=deployments())
def test_the_same_again(trace: Trace, deployment: SimulationSettings) -> None:
    before = [getattr(trace, name).copy() for name in ("arrival_s", "input_tokens", "output_tokens", "block_ids")]
    first, second = (arrays_of(simulate(trace, timing(), deployment)) for _ in range(2))
    for name, value in first.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, second[name])
        else:
            assert value == second[name]
    after = [getattr(trace, name) for name in ("arrival_s", "input_tokens", "output_tokens", "block_ids")]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("touch_order", ["back_to_front", "front_to_back"])
@settings(max_examples=60, deadline=None)
@given(trace=traces(max_requests=30))
def test_more_memory_never_hits_less(touch_order: Any, trace: Trace) -> None:
    hits = [
        simulate(
            trace,
            InstantTiming(MODEL),
            SimulationSettings(
                mode="monolithic",
                local_prefix_cache=False,
                dram_bytes=num_blocks * BLOCK_BYTES,
                partial_blocks="hit",
                store_answers=False,
                touch_order=touch_order,
            ),
        ).hit_blocks
        for num_blocks in (0, 1, 3, 6, 10, 20)
    ]
    assert hits == sorted(hits)
    assert hits[0] == 0
