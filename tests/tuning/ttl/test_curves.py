from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.trace.random_traces import traces
from tests.tuning.ttl.path_traces import path_trace
from tuning.trace.errors import TraceUsageError
from tuning.trace.trace import Trace
from tuning.ttl.curves import ReuseCurve, reuse_curves, total_block_s
from tuning.ttl.groups import group_of_block
from tuning.ttl.uses import block_uses

INTERVALS_S = st.lists(st.integers(0, 12), max_size=8).map(lambda values: np.array(values, np.float64))


def test_by_hand() -> None:
    # Block a at 0, 10 and 14 s, block b at 0 and 14 s: intervals 10, 4 and 14, and two last uses.
    uses = block_uses(path_trace((0, "ab"), (10, "a"), (14, "ab")))
    (curve,) = reuse_curves(uses, np.zeros(2, np.int32), 1)
    assert curve.num_blocks == 2
    assert curve.intervals_s.tolist() == [4, 10, 14]
    assert curve.choices_s.tolist() == [0, 4, 10, 14]
    assert curve.choice_hits.tolist() == [0, 1, 2, 3]
    # At 5 s: 4 + 5 + 5 between uses, and 5 after each of the two last ones.
    assert [(curve.hits(ttl_s), curve.block_s(ttl_s)) for ttl_s in (0, 4, 5, 14, 100)] == [
        (0, 0),
        (1, 20),
        (1, 24),
        (3, 56),
        (3, 228),
    ]
    assert curve.choice_block_s.tolist() == [0, 20, 44, 56]


def test_a_block_that_is_never_used_again_takes_its_ttl() -> None:
    curve = ReuseCurve(np.empty(0), 3)
    assert (curve.hits(7), curve.block_s(7)) == (0, 21)
    assert curve.choices_s.tolist() == [0]


def test_uses_at_the_same_time_hit_for_nothing() -> None:
    (curve,) = reuse_curves(block_uses(path_trace((0, "a"), (0, "a"), (3, "a"))), np.zeros(1, np.int32), 1)
    assert (curve.hits(0), curve.block_s(0)) == (1, 0)
    assert (curve.hits(2), curve.block_s(2)) == (1, 4)


@given(traces(), st.data(), st.integers(0, 70))
@settings(deadline=None, max_examples=60)
def test_curves_count_what_is_held_moment_by_moment(trace: Trace, data: st.DataObject, ttl_s: int) -> None:
    """Whole seconds in which a block is held, found one by one."""
    trace = trace.scaled(0.001)  # milliseconds become seconds
    roots = data.draw(st.lists(st.integers(0, trace.num_ids - 1), unique=True, max_size=3))
    groups = group_of_block(trace, roots)
    curves = reuse_curves(block_uses(trace), groups, len(roots) + 1)
    held: set[tuple[int, int]] = set()
    hits = [0] * len(curves)
    last_use_s: dict[int, int] = {}
    for row, arrival_s in enumerate(np.rint(trace.arrival_s).astype(int).tolist()):
        for block in trace.block_ids[trace.block_offsets[row] : trace.block_offsets[row + 1]].tolist():
            if block in last_use_s and arrival_s - last_use_s[block] <= ttl_s:
                hits[groups[block]] += 1
            last_use_s[block] = arrival_s
            held.update((block, arrival_s + second) for second in range(ttl_s))
    for group, curve in enumerate(curves):
        assert curve.hits(ttl_s + 1e-6) == hits[group]
        assert math.isclose(curve.block_s(ttl_s), sum(groups[block] == group for block, _ in held), abs_tol=1e-6)
        assert curve.num_blocks == np.count_nonzero(groups == group)


@given(INTERVALS_S, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_choices_are_points_of_the_curves(intervals_s: np.typing.NDArray[np.float64], num_blocks: int) -> None:
    curve = ReuseCurve(intervals_s, num_blocks)
    for choice, ttl_s in enumerate(curve.choices_s.tolist()):
        assert curve.choice_hits[choice] == curve.hits(ttl_s)
        assert curve.choice_block_s[choice] == curve.block_s(ttl_s)
        assert curve.choice_at_most(ttl_s) == curve.choice_at_most(ttl_s + 0.5) == choice
    assert curve.choice_at_most(-1e-9) == 0
    assert (np.diff(curve.choice_block_s) > 0).all()


@given(INTERVALS_S, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_the_envelope_is_above_all_choices_and_its_return_falls(
    intervals_s: np.typing.NDArray[np.float64], num_blocks: int
) -> None:
    curve = ReuseCurve(intervals_s, num_blocks)
    corners = curve.envelope()
    block_s, hits = curve.choice_block_s[corners], curve.choice_hits[corners]
    assert corners[0] == 0
    assert corners[-1] == len(curve.choices_s) - 1
    above = np.interp(curve.choice_block_s, block_s, hits)
    assert (above >= curve.choice_hits - 1e-9).all()
    assert (np.diff(np.diff(hits) / np.diff(block_s)) < 0).all()


def test_totals_are_of_all_groups() -> None:
    curves = (ReuseCurve(np.array([1.0, 5.0]), 2), ReuseCurve(np.array([2.0]), 1))
    assert total_block_s(curves, [1, 2]) == (2 * 1 + 1 + 1) + (2 + 2)


def test_partial_last_blocks_may_be_left_out() -> None:
    trace = path_trace((0, "ab"), (3, "ab"), (5, "abc"), (6, "x"), partial=(0, 1, 3))
    assert block_uses(trace, "hit").interval_s.tolist() == [np.inf, np.inf, 3, 3, 2, 2, np.inf, np.inf]
    uses = block_uses(trace, "miss")
    assert uses.request_offsets.tolist() == [0, 1, 2, 5, 5]
    assert uses.block_ids.tolist() == [0, 0, 0, 1, 2]
    assert uses.interval_s.tolist() == [np.inf, 3, 2, np.inf, np.inf]
    assert uses.next_interval_s.tolist() == [3, 2, np.inf, np.inf, np.inf]
    # The block x was only ever a partial one: it is none of the group's.
    (curve,) = reuse_curves(uses, np.zeros(trace.num_ids, np.int32), 1)
    assert curve.num_blocks == 3


def test_traces_without_uses_are_refused() -> None:
    with pytest.raises(TraceUsageError, match="no prompt fills a block of 2 tokens"):
        block_uses(path_trace((0, "a"), partial=(0,)), "miss")
    with pytest.raises(ValueError, match="partial_blocks='drop'"):
        block_uses(path_trace((0, "a")), "drop")  # type: ignore[arg-type]
    lengths_only = Trace(
        name="azure",
        arrival_s=np.zeros(1),
        input_tokens=np.ones(1, np.int64),
        output_tokens=np.ones(1, np.int64),
        block_tokens=None,
        block_offsets=np.zeros(2, np.int64),
        block_ids=np.empty(0, np.int64),
        parent_request=np.full(1, -1),
        turn=np.ones(1, np.int32),
    )
    with pytest.raises(TraceUsageError, match="no block hashes"):
        block_uses(lengths_only)


@pytest.mark.parametrize(
    ("intervals_s", "num_blocks"), [([-1.0], 1), ([np.inf], 1), ([np.nan], 1), ([1.0], 0), ([], -1)]
)
def test_curves_of_nothing_real_are_refused(intervals_s: list[float], num_blocks: int) -> None:
    with pytest.raises(ValueError, match="re-use interval"):
        ReuseCurve(np.array(intervals_s), num_blocks)
