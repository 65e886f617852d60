from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.trace.random_traces import blocks_of, traces
from tuning.trace.reuse import gaps_s, ideal_hits, next_uses_s, working_set
from tuning.trace.subtrees import Subtree, hottest_subtrees
from tuning.trace.trace import Trace


@settings(deadline=None)
@given(traces())
def test_ideal_hits_are_those_of_a_cache_that_never_forgets(trace: Trace) -> None:
    cache: set[int] = set()
    full_cache: set[int] = set()
    hits = full_hits = 0
    for row in range(len(trace)):
        blocks = blocks_of(trace, row)
        hits += next((depth for depth, block in enumerate(blocks) if block not in cache), len(blocks))
        full = blocks[:-1] if trace.last_is_partial[row] else blocks
        full_hits += next((depth for depth, block in enumerate(full) if block not in full_cache), len(full))
        cache.update(blocks)
        full_cache.update(full)
    ideal = ideal_hits(trace)
    assert (ideal.hits, ideal.full_block_hits) == (hits, full_hits)
    assert ideal.blocks == len(trace.block_ids)


@settings(deadline=None)
@given(traces())
def test_gaps_last_until_the_next_use(trace: Trace) -> None:
    uses = [(time, block) for row, time in enumerate(trace.arrival_s) for block in blocks_of(trace, row)]
    expected = [
        next((later - time for later, other in uses[place + 1 :] if other == block), math.inf)
        for place, (time, block) in enumerate(uses)
    ]
    assert gaps_s(trace).tolist() == expected


@settings(deadline=None)
@given(traces(), st.sampled_from((0.001, 0.25, 60.0, math.inf)))
def test_working_set_is_what_the_window_holds(trace: Trace, window_s: float) -> None:
    at_s = [0.0, 0.2, 30.0, *trace.arrival_s.tolist()]
    expected = [
        len(
            {
                block
                for row, time in enumerate(trace.arrival_s)
                # As the program adds, lest rounding decide whether a use is just outside.
                if time <= at and at < time + window_s
                for block in blocks_of(trace, row)
            }
        )
        for at in at_s
    ]
    assert working_set(trace, next_uses_s(trace), at_s, window_s).tolist() == expected


def test_a_block_that_is_used_again_is_in_the_working_set_once() -> None:
    """Where its first use and the gap after that add up to more than its next one: 0.001 + (0.009 - 0.001) > 0.009."""
    trace = Trace(
        name="two uses",
        arrival_s=np.array([0.0, 0.001, 0.009]),
        input_tokens=np.array([1, 1, 1]),
        output_tokens=np.array([1, 1, 1]),
        block_tokens=1,
        block_offsets=np.array([0, 1, 2, 3]),
        block_ids=np.array([0, 1, 1]),
        parent_request=np.array([-1, -1, 1]),
        turn=np.array([1, 1, 2], dtype=np.int32),
        kind=(),
    )
    assert working_set(trace, next_uses_s(trace), [0.009], 60.0).tolist() == [2]


@settings(deadline=None)
@given(traces())
def test_subtrees_hold_what_is_below_their_root(trace: Trace) -> None:
    paths = [tuple(blocks_of(trace, row)) for row in range(len(trace))]
    expected = []
    for root in range(trace.num_ids):
        through = [path[path.index(root) :] for path in paths if root in path]
        depth = next(path.index(root) + 1 for path in paths if root in path)
        above = trace.block_parent[root]
        if len(through) > 1 and (above == -1 or sum(above in path for path in paths) > len(through)):
            blocks = len({block for path in through for block in path})
            hits = sum(map(len, through)) - blocks
            expected.append(Subtree(root, depth, len(through), blocks, hits))
    expected.sort(key=lambda tree: (-tree.hits, tree.root))
    assert hottest_subtrees(trace, 100) == expected
    assert hottest_subtrees(trace, 2) == expected[:2]
