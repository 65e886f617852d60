"""Small fleets whose figures can be followed by hand, and loads worked out lane by lane."""

from __future__ import annotations

import math

from migrate.cost_model import CostModel, LinkSpeed, MeasuredTimes, ModelSizes
from migrate.fleet import Fleet
from migrate.move_settings import MoveSettings
from migrate.placement import Placement
from migrate.worker_figures import WorkerFigures
from migrate.worker_share import busy_with_others


def model(
    *,
    layers: int = 4,
    heads: int = 4,
    attention: float = 0.0,
    latency_s: float = 0.0,
    switch_s: float = 0.0,
    hosted_slice_s: float | None = None,
) -> CostModel:
    """1 ms a prompt token and layer; a decode step takes 2 ms and 1 ms a row in each layer, full at 8 rows. A layer's
    weights are 1,000 bytes, a page 10; a link carries 100,000 bytes a second."""
    return CostModel(
        ModelSizes(layers, heads, layer_weight_bytes=1000, page_bytes=10, hidden_bytes=8, query_bytes=4, key_bytes=2),
        MeasuredTimes(
            prefill_token_s=0.001,
            step_s=0.002,
            row_s=0.001,
            full_batch=8,
            prefill_attention_share=attention,
            decode_attention_share=attention,
        ),
        LinkSpeed(bytes_per_s=100_000, latency_s=latency_s),
        switch_s=switch_s,
        hosted_slice_s=hosted_slice_s,
    )


def worker(name: str, **figures: float) -> WorkerFigures:
    """With four layers of four heads: 4,000 bytes of weights, and 16,000 for 100 blocks of 160 bytes."""
    given = {"memory_bytes": 20_000, "total_blocks": 100, **figures}
    return WorkerFigures(name, **given)  # type: ignore[arg-type]


def fleet(cost: CostModel, *workers: WorkerFigures, placed: tuple[Placement, ...] = ()) -> Fleet:
    """Instances that `placed` does not have are at home."""
    home = {item.worker: at_home(item.worker, cost) for item in workers}
    return Fleet.of(workers, {**home, **{placement.home: placement for placement in placed}}.values(), cost)


def at_home(name: str, cost: CostModel) -> Placement:
    return Placement.at_home(name, cost.sizes.num_layers, cost.sizes.num_kv_heads)


def following(fleet: Fleet, settings: MoveSettings) -> float:
    """How many times as many tokens will be wanted when all prompts that wait are computed."""
    done = sum(item.prefilled_tokens_per_s for item in fleet.figures.values())
    wanted = sum(
        item.prefill_tokens_per_s + item.pending_prefill_tokens / settings.horizon_s for item in fleet.figures.values()
    )
    return 1.0 if done == 0 else min(len(fleet.figures), max(1.0, wanted / done))


def rows_shared(fleet: Fleet, tokens_per_s: float, settings: MoveSettings) -> float:
    """By trying: as a step takes longer, more tokens come to share it."""
    times, layers = fleet.model.times, fleet.model.sizes.num_layers

    def too_few(rows: float) -> bool:
        return tokens_per_s * (layers * times.layer_s(rows) + times.head_s(rows)) > rows

    low, high = 1.0, float(times.full_batch)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_few(middle) else (low, middle)
    rows = min(low, max(1.0, times.known_rows or math.inf))
    return min(rows * settings.max_itl_ratio, times.full_batch)


def waited_s(fleet: Fleet, home: str, rows: float, attention_s: float, horizon_s: float) -> float:
    """What home waits for heads elsewhere in one pass, layer by layer. `attention_s`: of all heads of one layer."""
    placement, sizes, seconds = fleet.placements[home], fleet.model.sizes, 0.0
    for owner, lanes in zip(placement.layer_workers, placement.lane_workers, strict=True):
        arrivals = [0.0]
        for host in (set(lanes) - {home}) if owner == home else ():
            heads, link = lanes.count(host), fleet.model.link_between(home, host)
            slow = 1 + (busy_with_others(fleet, home, host, horizon_s) if host in fleet.figures else 0)
            num_bytes = rows * heads * 2 * (sizes.query_bytes + sizes.key_bytes)
            arrivals.append(attention_s * heads / len(lanes) * slow + num_bytes / link.bytes_per_s + 2 * link.latency_s)
        seconds += max(0.0, max(arrivals) - attention_s * lanes.count(home) / len(lanes))
    return seconds


def load_by_lane(fleet: Fleet, worker: str, settings: MoveSettings) -> float:
    """U of a worker, summed lane by lane and layer by layer."""
    times, sizes = fleet.model.times, fleet.model.sizes
    compute = 0.0
    live_pages = 0
    weights: set[int] = set()
    for home, placement in fleet.placements.items():
        own = fleet.figures[home]
        groups = len(set(placement.layer_workers))
        prefill_s = (own.prefill_tokens_per_s + own.pending_prefill_tokens / settings.horizon_s) * times.prefill_token_s
        decode = (own.decode_tokens_per_s + own.pending_decode_tokens / settings.horizon_s) * following(fleet, settings)
        rows = rows_shared(fleet, decode, settings)
        # A batch in `groups` steps of rows / groups rows, each in one layer; one row is no two groups.
        a_batch_s = min(groups, rows) * times.step_s + times.row_s * rows
        decode_s = decode * a_batch_s / rows
        for layer in range(sizes.num_layers):
            if placement.layer_workers[layer] == worker:
                weights.add(layer)
                compute += prefill_s * (1 - times.prefill_attention_share)
                compute += decode_s * (1 - times.decode_attention_share)
            for head in range(sizes.num_kv_heads):
                if placement.lane_workers[layer][head] == worker:
                    compute += prefill_s * times.prefill_attention_share / sizes.num_kv_heads
                    compute += decode_s * times.decode_attention_share / sizes.num_kv_heads
                    live_pages += own.live_blocks
        if home == worker:
            compute += decode * (times.head_step_s * min(groups, rows) / rows + times.head_row_s)
            group, chunk = rows / min(groups, rows), max(1.0, own.prefill_step_tokens)
            attention_s = times.decode_attention_share * (times.step_s + times.row_s * group)
            compute += decode / group * waited_s(fleet, home, group, attention_s, settings.horizon_s)
            chunk_attention_s = times.prefill_attention_share * times.prefill_token_s * chunk
            chunks = (own.prefill_tokens_per_s + own.pending_prefill_tokens / settings.horizon_s) / chunk
            compute += chunks * waited_s(fleet, home, chunk, chunk_attention_s, settings.horizon_s)
    for_kv = fleet.figures[worker].memory_bytes - len(weights) * sizes.layer_weight_bytes
    memory = live_pages * sizes.page_bytes / for_kv
    return settings.compute_weight * compute + settings.memory_weight * memory
