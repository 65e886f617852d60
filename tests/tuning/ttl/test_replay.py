"""Replays against the plainest loops that do the same, and against the live store's own policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.policy.groups import GroupTable
from kv.policy.lru import LruPolicy
from kv.policy.policy_file import dump, load, make_groups, make_policy
from tests.tuning.trace.random_traces import blocks_of, traces
from tests.tuning.ttl.path_traces import path_trace
from tuning.simulator.group_roots import groups_of_trace, root_key
from tuning.trace.trace import Trace
from tuning.ttl.curves import reuse_curves
from tuning.ttl.groups import group_of_block
from tuning.ttl.plan import solve
from tuning.ttl.policy import to_policy_spec
from tuning.ttl.pool import pool_reuse_ratio
from tuning.ttl.replay import residence, ttl_reuse_ratio
from tuning.ttl.uses import block_uses

TTLS_S = st.sampled_from((0.0, 0.001, 0.25, 0.3, 60.0, None))


@given(traces(), TTLS_S, TTLS_S, st.data())
@settings(deadline=None, max_examples=60)
def test_hits_are_what_is_there_with_all_before_it(
    trace: Trace, rest_s: float | None, group_s: float | None, data: st.DataObject
) -> None:
    groups = group_of_block(trace, [data.draw(st.integers(0, trace.num_ids - 1))])
    first_request = data.draw(st.integers(0, len(trace) - 1))
    ttls_s = (rest_s, group_s)
    last_use_s: dict[int, float] = {}
    hits, counted = 0, 0
    for row, now_s in enumerate(trace.arrival_s.tolist()):
        reached = True
        for block in blocks_of(trace, row):
            ttl_s = ttls_s[groups[block]]
            here = block in last_use_s and (ttl_s is None or now_s - last_use_s[block] <= ttl_s)
            reached = reached and here
            hits += reached and row >= first_request
            counted += row >= first_request
            last_use_s[block] = now_s
    assert ttl_reuse_ratio(block_uses(trace), groups, ttls_s, first_request) == hits / counted


@given(traces(), st.integers(0, 70), st.data())
@settings(deadline=None, max_examples=60)
def test_what_is_held_moment_by_moment(trace: Trace, ttl_s: int, data: st.DataObject) -> None:
    trace = trace.scaled(0.001)  # milliseconds become seconds
    first_request = data.draw(st.integers(0, len(trace) - 1))
    arrivals_s = np.rint(trace.arrival_s).astype(int).tolist()
    start_s, end_s = arrivals_s[first_request], arrivals_s[-1]
    held: set[tuple[int, int]] = set()
    last_use_s: dict[int, int] = {}
    peak = 0
    for row, now_s in enumerate(arrivals_s):
        for block in blocks_of(trace, row):
            last_use_s[block] = now_s
            held.update((block, second) for second in range(max(now_s, start_s), min(now_s + ttl_s, end_s)))
        if row >= first_request:
            peak = max(peak, sum(now_s - last_s <= ttl_s for last_s in last_use_s.values()))
    groups = np.zeros(trace.num_ids, np.int32)
    # Half a millisecond more than the whole seconds: scaled times are not whole to the last bit.
    found = residence(block_uses(trace), groups, (ttl_s + 0.0005,), first_request)
    assert found.peak_blocks == peak
    mean_blocks = len(held) / (end_s - start_s) if end_s > start_s else 0
    assert math.isclose(found.mean_blocks, mean_blocks, abs_tol=0.01 * trace.num_ids)


def test_held_by_hand() -> None:
    # a from 0 to 3 and from 4 to the end at 8, b from 4 to 7, c at 8.
    uses = block_uses(path_trace((0, "a"), (4, "ab"), (6, "a"), (8, "c")))
    found = residence(uses, np.zeros(3, np.int32), (3,))
    assert (found.mean_blocks, found.peak_blocks) == ((3 + 4 + 3) / 8, 2)
    assert residence(uses, np.zeros(3, np.int32), (3,), first_request=2).mean_blocks == (2 + 1) / 2


def test_a_suffix_without_its_prefix_is_no_hit() -> None:
    trace = path_trace((0, "ab"), (10, "ab"))
    groups = group_of_block(trace, [1])
    assert ttl_reuse_ratio(block_uses(trace), groups, (5, 20)) == 0
    assert ttl_reuse_ratio(block_uses(trace), groups, (20, 5)) == 1 / 4
    assert ttl_reuse_ratio(block_uses(trace), groups, (10, 10)) == 2 / 4


@given(traces(), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_lru_in_a_pool(trace: Trace, capacity_blocks: int) -> None:
    """The last used at the end of a list; of one prompt the first block is the last to go."""
    here: list[int] = []
    hits = 0
    for row in range(len(trace)):
        blocks = blocks_of(trace, row)
        found = [block in here for block in blocks]
        hits += [*found, False].index(False)
        here = [block for block in here if block not in blocks] + blocks[::-1]
        here = here[max(len(here) - capacity_blocks, 0) :]
    groups = np.zeros(trace.num_ids, np.int32)
    found_ratio = pool_reuse_ratio(block_uses(trace), LruPolicy(), groups, capacity_blocks)
    assert found_ratio == hits / len(trace.block_ids)


def test_a_pool_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_blocks=-1"):
        pool_reuse_ratio(block_uses(path_trace((0, "a"))), LruPolicy(), np.zeros(1, np.int32), -1)


@given(traces(), st.floats(0, 200), st.data())
@settings(deadline=None, max_examples=60)
def test_the_live_store_s_policy_does_with_the_file_what_the_plan_says(
    trace: Trace, budget_block_s: float, data: st.DataObject
) -> None:
    roots = data.draw(st.lists(st.integers(0, trace.num_ids - 1), unique=True, max_size=3))
    uses = block_uses(trace)
    groups = group_of_block(trace, roots)
    plan = solve(reuse_curves(uses, groups, len(roots) + 1), budget_block_s, horizon_s=uses.horizon_s)
    spec = load(dump(to_policy_spec(plan, [root_key(root) for root in roots], "lfu")))
    assert spec.eviction == "lfu"
    policy, table = make_policy(spec), make_groups(spec)
    assert table.names == ("rest", *(f"group-{number}" for number in range(1, len(roots) + 1)))
    live_groups = _groups_by_chain(trace, table)
    assert live_groups.tolist() == groups.tolist() == (groups_of_trace(trace, spec) or [0] * trace.num_ids)
    in_the_store = pool_reuse_ratio(uses, policy, live_groups, trace.num_ids)
    assert in_the_store == ttl_reuse_ratio(uses, groups, plan.ttls_s)
    # Across groups a block may outlive the one before it, so curves may promise more. Within one they cannot.
    assert in_the_store * len(uses.block_ids) <= plan.total_hits + 1e-6
    if not roots:
        assert round(in_the_store * len(uses.block_ids)) == plan.total_hits


def _groups_by_chain(trace: Trace, table: GroupTable) -> np.typing.NDArray[np.int32]:
    groups = np.zeros(trace.num_ids, np.int32)
    for row in range(len(trace)):
        above = 0
        for block in blocks_of(trace, row):
            above = groups[block] = table.group_of(above, [root_key(block)])
    return groups


def test_a_policy_has_a_root_for_each_group() -> None:
    uses = block_uses(path_trace((0, "a"), (1, "a")))
    plan = solve(reuse_curves(uses, np.zeros(1, np.int32), 1), 5, horizon_s=1)
    with pytest.raises(ValueError, match="1 keys for 0 groups"):
        to_policy_spec(plan, [bytes(32)])
