"""What a simulation found."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuning.simulator.flow import Flow
from tuning.simulator.instance import Instance
from tuning.simulator.lane import Lane
from tuning.simulator.store import MovedBytes
from tuning.simulator.summary import summarise
from tuning.simulator.tier_blocks import TierBlocks
from tuning.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class TierResult:
    """One tier of the store over the whole run."""

    capacity_bytes: int
    used_bytes: int
    """At the end."""
    peak_bytes: int
    read_bytes: int
    written_bytes: int
    read_busy_s: float
    write_busy_s: float
    read_waited_s: float
    """That transfers waited for those before them, together; so `write_waited_s`."""
    write_waited_s: float
    inserted_blocks: int
    evicted_blocks: int
    """To make room."""
    expired_blocks: int
    """That outlived their time-to-live."""


@dataclass(frozen=True, slots=True)
class InstanceResult:
    """One instance over the whole run."""

    worker_id: str
    busy_share: float
    """Of the time from the first arrival to the last token."""
    pool_blocks: int
    peak_held_blocks: int
    """By requests at one time."""
    link_in_bytes: int
    link_out_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """Columns have an entry for each row of the trace; times are in its seconds.

    A request that fits on no instance is refused: its times are NaN, its instances -1. The arrays belong to the caller.
    """

    arrival_s: NDArray[np.float64]
    admitted_s: NDArray[np.float64]
    """When instances were chosen."""
    prefill_start_s: NDArray[np.float64]
    """When its fetch began, or its computing where there was none."""
    first_token_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """At least 1: an answer has at least the token that ends it."""
    hit_tokens_device: NDArray[np.int64]
    hit_tokens_dram: NDArray[np.int64]
    hit_tokens_disk: NDArray[np.int64]
    """That only the disk had when the request came, or when its prefill began."""
    computed_tokens: NDArray[np.int64]
    """With the three kinds of hits, the whole prompt."""
    prefill_instance: NDArray[np.int64]
    decode_instance: NDArray[np.int64]
    gap_s: NDArray[np.float64]
    """Times between tokens of one answer; `gap_count` says how often each was seen."""
    gap_count: NDArray[np.int64]
    dram: TierResult
    disk: TierResult
    moved: MovedBytes
    instances: tuple[InstanceResult, ...]
    refused: tuple[int, ...]
    """Rows."""
    hit_blocks: int
    """Blocks of prompts that were not computed again."""
    prompt_blocks: int
    """Of the requests that were not refused."""
    disk_refused_blocks: int
    """That were not written to the disk, because too much waited."""
    makespan_s: float
    """From the first arrival to the last token."""
    request_s: float
    """Requests in the system, integrated over time."""
    num_events: int

    @property
    def block_hit_ratio(self) -> float:
        """Hits among the blocks of all prompts."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def summary(self) -> dict[str, float]:
        """Figures by name: see `tuning.simulator.summary`."""
        return summarise(self)


def collect(trace: Trace, flow: Flow, instances: Sequence[Instance], num_events: int) -> SimulationResult:
    """The result of a flow in which everything has happened."""
    outcomes, store, prompts = flow.outcomes, flow.store, flow.prompts
    end_s = _floats(outcomes.end_s)
    is_done = ~np.isnan(end_s)
    makespan_s = float(end_s[is_done].max()) if is_done.any() else 0.0
    input_tokens = np.array(trace.input_tokens)
    return SimulationResult(
        arrival_s=np.array(trace.arrival_s),
        admitted_s=_floats(outcomes.admitted_s),
        prefill_start_s=_floats(outcomes.prefill_start_s),
        first_token_s=_floats(outcomes.first_token_s),
        end_s=end_s,
        input_tokens=input_tokens,
        output_tokens=np.array(prompts.output_tokens, np.int64),
        hit_tokens_device=_ints(outcomes.hit_tokens_device),
        hit_tokens_dram=_ints(outcomes.hit_tokens_dram),
        hit_tokens_disk=_ints(outcomes.hit_tokens_disk),
        computed_tokens=_ints(outcomes.computed_tokens),
        prefill_instance=_ints(outcomes.prefill_instance),
        decode_instance=_ints(outcomes.decode_instance),
        gap_s=_floats(flow.gaps.seconds),
        gap_count=_ints(flow.gaps.counts),
        dram=_tier(store.dram, store.dram_read, store.dram_write, store.block_bytes),
        disk=_tier(store.disk, store.disk_read, store.disk_write, store.block_bytes),
        moved=store.moved,
        instances=tuple(_instance(instance, makespan_s) for instance in instances),
        refused=tuple(flow.refused),
        hit_blocks=sum(outcomes.hit_blocks),
        prompt_blocks=int((-(-input_tokens[is_done] // prompts.block_tokens)).sum()),
        disk_refused_blocks=store.write_behind.refused_blocks,
        makespan_s=makespan_s,
        request_s=outcomes.request_s,
        num_events=num_events,
    )


def _tier(blocks: TierBlocks, read: Lane, write: Lane, block_bytes: int) -> TierResult:
    return TierResult(
        capacity_bytes=blocks.capacity_blocks * block_bytes,
        used_bytes=blocks.used_blocks * block_bytes,
        peak_bytes=blocks.peak_blocks * block_bytes,
        read_bytes=read.num_bytes,
        written_bytes=write.num_bytes,
        read_busy_s=read.busy_s,
        write_busy_s=write.busy_s,
        read_waited_s=read.waited_s,
        write_waited_s=write.waited_s,
        inserted_blocks=blocks.inserted_blocks,
        evicted_blocks=blocks.evicted_blocks,
        expired_blocks=blocks.expired_blocks,
    )


def _instance(instance: Instance, makespan_s: float) -> InstanceResult:
    return InstanceResult(
        worker_id=instance.worker_id,
        busy_share=instance.busy_s / makespan_s if makespan_s > 0 else 0.0,
        pool_blocks=instance.pool.capacity_blocks,
        peak_held_blocks=instance.pool.peak_held_blocks,
        link_in_bytes=instance.link_in.num_bytes,
        link_out_bytes=instance.link_out.num_bytes,
    )


def _floats(values: array[float]) -> NDArray[np.float64]:
    return np.array(values, np.float64)


def _ints(values: array[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
