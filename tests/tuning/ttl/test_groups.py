from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.policy.groups import GroupTable
from tests.tuning.trace.random_traces import traces
from tests.tuning.ttl.path_traces import block_id, path_trace
from tuning.trace.trace import Trace
from tuning.ttl.groups import group_of_block, group_roots


@given(traces(), st.data())
@settings(deadline=None, max_examples=60)
def test_blocks_belong_to_the_deepest_root_as_in_the_live_store(trace: Trace, data: st.DataObject) -> None:
    roots = data.draw(st.lists(st.integers(0, trace.num_ids - 1), unique=True, max_size=4))
    table = GroupTable((str(root), root.to_bytes(32, "big")) for root in roots)
    expected: list[int] = []
    for block, parent in enumerate(trace.block_parent.tolist()):
        above = expected[parent] if parent >= 0 else 0
        expected.append(table.group_of(above, [block.to_bytes(32, "big")]))
    groups = group_of_block(trace, roots)
    assert groups.dtype == np.int32
    assert groups.tolist() == expected


@pytest.mark.parametrize(("roots", "message"), [([3], "no block"), ([-1], "no block"), ([1, 1], "given twice")])
def test_roots_that_name_no_group_are_refused(roots: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_of_block(path_trace((0, "abc")), roots)


def test_subtrees_come_by_their_hits_until_they_cover_enough() -> None:
    # a: 5 hits, b: 3, c: 1.
    trace = path_trace((0, "a1"), (1, "a1"), (2, "a1"), (3, "a2"), (4, "b3"), (5, "b3"), (6, "b4"), (7, "c"), (8, "c"))
    a, b, c = block_id(trace, 0, 0), block_id(trace, 4, 0), block_id(trace, 7, 0)
    assert group_roots(trace, coverage=5 / 9, max_groups=9) == (a,)
    assert group_roots(trace, coverage=6 / 9, max_groups=9) == (a, b)
    assert group_roots(trace, coverage=1, max_groups=9) == (a, b, c)
    assert group_roots(trace, coverage=1, max_groups=2) == (a, b)
    assert group_roots(trace, coverage=1, max_groups=0) == ()


def test_what_all_requests_share_is_taken_apart() -> None:
    # "ss" is a system prompt. Six requests go on with x, six with y.
    trace = path_trace(*[(time, f"ss{'x' if time % 2 else 'y'}{time // 4}") for time in range(12)])
    x, y = block_id(trace, 1, 2), block_id(trace, 0, 2)
    # The system prompt has 22 hits; x and y have 5 each, and their children 1 each.
    assert group_roots(trace, coverage=1, max_groups=9) == (y, x)
    assert group_roots(trace, coverage=0.5, max_groups=9) == (y,)


def test_one_large_subtree_beside_others_is_a_group() -> None:
    trace = path_trace(*[(time, "ab") for time in range(8)], (8, "c"), (9, "c"), (10, "d"))
    assert group_roots(trace, coverage=1, max_groups=9) == (block_id(trace, 0, 0), block_id(trace, 8, 0))


def test_without_reuse_there_is_no_group() -> None:
    assert group_roots(path_trace((0, "ab"), (1, "cd")), coverage=1, max_groups=9) == ()


@given(traces(), st.sampled_from((0.3, 0.9, 1.0)), st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_no_group_lies_in_another(trace: Trace, coverage: float, max_groups: int) -> None:
    roots = group_roots(trace, coverage=coverage, max_groups=max_groups)
    assert len(roots) <= max_groups
    for root in roots:
        above = int(trace.block_parent[root])
        while above >= 0:
            assert above not in roots
            above = int(trace.block_parent[above])


@pytest.mark.parametrize("coverage", [0.0, 1.1])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="coverage="):
        group_roots(path_trace((0, "a")), coverage=coverage, max_groups=1)


def test_less_than_no_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="max_groups=-1"):
        group_roots(path_trace((0, "a")), coverage=1, max_groups=-1)
