from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.extents import ExtentSlice, Lookup
from kv.fetch_choice import FetchCosts, FetchRun, may_compute_meanwhile, runs_of, tokens_that_may_pay, tokens_to_fetch
from kv.layout import KvLayout
from kv.part_range import LaneRange
from kv.tiers import TIERS

RUNS = st.lists(
    st.builds(FetchRun, num_tokens=st.integers(1, 40), num_bytes=st.integers(1, 1000), tier=st.sampled_from(TIERS)),
    max_size=7,
)
COSTS = st.builds(
    lambda dram, disk, fixed, prefill: FetchCosts({"dram": dram, "disk": disk}, fixed, prefill),
    dram=st.floats(1.0, 1e4),
    disk=st.floats(1.0, 1e4),
    fixed=st.floats(0.0, 2.0),
    prefill=st.floats(0.1, 1e3),
)
EVEN = FetchCosts({"dram": 64.0, "disk": 8.0}, 0.5, 16.0)
"""Powers of two, so that sums are exact."""


def total_s(runs: list[FetchRun], costs: FetchCosts, cut: int) -> float:
    """Of fetching the first `cut` tokens and computing the others, written out token by token."""
    tier_of = [number for number, run in enumerate(runs) for _ in range(run.num_tokens)]
    fetched = {tier_of[token] for token in range(cut)}
    fetch_s = sum(
        costs.s_per_extent + runs[number].num_bytes / costs.bytes_per_s[runs[number].tier] for number in sorted(fetched)
    )
    return fetch_s + (len(tier_of) - cut) / costs.prefill_tokens_per_s


@given(runs=RUNS, costs=COSTS)
def test_no_other_cut_takes_less_time(runs: list[FetchRun], costs: FetchCosts) -> None:
    num_tokens = sum(run.num_tokens for run in runs)
    chosen = tokens_to_fetch(runs, costs)
    assert 0 <= chosen <= num_tokens
    least_s = min(total_s(runs, costs, cut) for cut in range(num_tokens + 1))
    assert total_s(runs, costs, chosen) <= least_s * (1 + 1e-9) + 1e-9


@given(runs=RUNS, costs=COSTS)
def test_what_may_pay_is_the_most_that_any_reader_would_choose(runs: list[FetchRun], costs: FetchCosts) -> None:
    starts = [0, *accumulate(run.num_tokens for run in runs)]
    chosen = [tokens_to_fetch(runs[number:], costs) for number in range(len(runs))]
    ends = [start + tokens for start, tokens in zip(starts, chosen, strict=False) if tokens]
    assert tokens_that_may_pay(runs, costs) == max(ends, default=0)


@pytest.mark.parametrize(
    ("runs", "tokens"),
    [
        ([], 0),
        ([(16, 32, "dram")], 16),  # 1 s, and 1 s to compute: equal
        ([(16, 33, "dram")], 0),
        ([(16, 33, "dram"), (16, 16, "dram")], 32),  # the second makes up for the first
        ([(16, 32, "disk"), (16, 32, "dram")], 0),  # 4.5 s + 1 s instead of 2 s
        ([(16, 16, "dram"), (16, 32, "disk"), (64, 32, "dram")], 16),  # 0.75 s; then 4.5 s + 1 s instead of 5 s
        ([(16, 16, "dram"), (16, 32, "disk"), (72, 32, "dram")], 104),  # instead of 5.5 s
    ],
)
def test_cases_worked_out_by_hand(runs: list[tuple[int, int, str]], tokens: int) -> None:
    assert tokens_to_fetch([FetchRun(*run) for run in runs], EVEN) == tokens  # type: ignore[arg-type]


def test_a_slow_run_in_front_is_no_reason_against_what_follows_while_the_reader_may_have_it() -> None:
    runs = [FetchRun(16, 32, "disk"), FetchRun(16, 32, "dram"), FetchRun(16, 32, "disk")]
    assert tokens_that_may_pay(runs, EVEN) == 32
    assert tokens_to_fetch(runs, EVEN) == 0
    assert tokens_to_fetch(runs[1:], EVEN) == 16


def test_runs_are_what_lies_beyond_the_held_blocks_with_all_the_bytes_of_their_extents() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
    first = ExtentSlice("a", "s", 0, 3, 0, 3, (LaneRange(0, 1, 0, 1), LaneRange(1, 1, 0, 1)))
    second = ExtentSlice("b", "s", 0, 2, 3, 4, (LaneRange(0, 2, 0, 1),), "disk")
    lookup = Lookup(1, (first, second), 5)
    extents = [3 * layout.block_bytes, 4 * layout.block_bytes]
    assert runs_of(lookup, layout) == [FetchRun(12, extents[0], "dram"), FetchRun(8, extents[1], "disk")]
    assert runs_of(lookup, layout, 2) == [FetchRun(4, extents[0], "dram"), FetchRun(8, extents[1], "disk")]
    assert runs_of(lookup, layout, 3) == [FetchRun(8, extents[1], "disk")]
    assert runs_of(lookup, layout, 5) == []


@given(num_layers=st.integers(1, 40), fetch_s=st.integers(1, 50), compute_s=st.integers(1, 50), data=st.data())
def test_layers_are_there_when_computing_that_began_needs_them(
    num_layers: int, fetch_s: int, compute_s: int, data: st.DataObject
) -> None:
    """Layers arrive every `fetch_s` and take `compute_s` each: a step may begin just when it never waits."""
    arrived = data.draw(st.integers(1, num_layers))
    begin_s = arrived * fetch_s
    late = [layer for layer in range(num_layers) if (layer + 1) * fetch_s > begin_s + layer * compute_s]
    may = may_compute_meanwhile(begin_s, arrived, num_layers, num_layers * compute_s)
    assert may == (not late) or _is_a_tie(num_layers, arrived, fetch_s, compute_s)


def _is_a_tie(num_layers: int, arrived: int, fetch_s: int, compute_s: int) -> bool:
    return (num_layers - arrived) * fetch_s == (num_layers - 1) * compute_s


@pytest.mark.parametrize(
    ("elapsed_s", "arrived", "compute_s", "may"),
    # 7/8 of the time to compute must do for what is missing: 7 s, 7 s, 4 s, 2 s, none.
    [(1.0, 1, 8.0, True), (1.0, 1, 7.5, False), (4.0, 4, 5.0, True), (6.0, 6, 2.0, False), (8.0, 8, 0.0, True)],
)
def test_computing_begins_when_the_rest_of_eight_layers_takes_no_longer(
    elapsed_s: float, arrived: int, compute_s: float, may: bool
) -> None:
    assert may_compute_meanwhile(elapsed_s, arrived, 8, compute_s) is may
