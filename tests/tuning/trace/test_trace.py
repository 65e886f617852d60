from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.tuning.trace.random_traces import blocks_of, equal, traces
from tuning.trace.trace import Trace


def fields(**changed: Any) -> dict[str, Any]:
    """Three requests in blocks of four tokens; the second goes on from the first block of the first."""
    return {
        "name": "three",
        "arrival_s": np.array([0.0, 1.5, 1.5]),
        "input_tokens": np.array([6, 8, 1]),
        "output_tokens": np.array([0, 3, 1]),
        "block_tokens": 4,
        "block_offsets": np.array([0, 2, 4, 5]),
        "block_ids": np.array([0, 1, 0, 2, 3]),
        "parent_request": np.array([-1, 0, -1]),
        "turn": np.array([1, 2, 1], dtype=np.int32),
        "kind": ("text", "text", "file"),
    } | changed


def test_says_what_it_holds() -> None:
    trace = Trace(**fields())
    assert len(trace) == 3
    assert trace.num_ids == 4
    assert trace.has_reuse
    assert trace.block_parent.tolist() == [-1, 0, 0, -1]
    assert trace.last_is_partial.tolist() == [True, False, True]


def test_without_reuse_information() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    trace = Trace(**fields(block_tokens=None, block_offsets=np.zeros(4, dtype=np.int64), block_ids=nothing))
    assert not trace.has_reuse
    assert trace.num_ids == 0
    assert trace.block_parent.tolist() == []
    assert trace.last_is_partial.tolist() == [False] * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arrival_s": np.array([0, 1, 2])}, "arrival_s must be a one-dimensional array of float64"),
        ({"turn": np.array([1, 2, 1])}, "turn must be a one-dimensional array of int32"),
        ({"arrival_s": np.array([1.0, 1.5, 1.5])}, "begin at 0"),
        ({"arrival_s": np.array([0.0, 2.0, 1.0])}, "never decrease"),
        ({"arrival_s": np.array([0.0, np.nan, 1.0])}, "finite"),
        ({"arrival_s": np.array([])}, "at least one request"),
        ({"output_tokens": np.array([0, 3])}, "output_tokens has 2 entries for 3 requests"),
        ({"output_tokens": np.array([0, 3, -1])}, "output_tokens holds -1: 0 is the least"),
        ({"input_tokens": np.array([6, 8, 0])}, "input_tokens holds 0: 1 is the least"),
        ({"turn": np.array([1, 0, 1], dtype=np.int32)}, "turn holds 0"),
        ({"parent_request": np.array([-1, -2, -1])}, "parent_request holds -2"),
        ({"parent_request": np.array([-1, 1, -1])}, "earlier row"),
        ({"kind": ("text",)}, "kind has 1 entries for 3 requests"),
        ({"block_tokens": 0}, "block_tokens=0 is not allowed"),
        ({"block_tokens": None}, "without block_tokens they stay 0"),
        ({"block_offsets": np.array([0, 2, 3, 5])}, "rise by ceil"),
        ({"block_offsets": np.array([0, 2, 4])}, "4 entries"),
        ({"block_ids": np.array([0, 1, 0, 2])}, "block_ids has 4 entries where block_offsets ends at 5"),
        ({"block_ids": np.array([0, 1, 0, 3, 2])}, "order of their first appearance"),
        ({"block_ids": np.array([1, 0, 1, 2, 3])}, "order of their first appearance"),
        ({"block_ids": np.array([0, 1, 2, 1, 3])}, "two different predecessors"),
        ({"block_ids": np.array([0, 1, 0, 2, 2])}, "two different predecessors"),
    ],
)
def test_refuses_what_is_not_allowed(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace(**fields(**changed))


def test_cannot_be_written_to() -> None:
    trace = Trace(**fields())
    for name in ("arrival_s", "input_tokens", "block_ids", "block_parent"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(trace, name)[0] = 0


def test_head_keeps_the_first_requests() -> None:
    head = Trace(**fields()).head(2)
    assert head.arrival_s.tolist() == [0.0, 1.5]
    assert head.block_ids.tolist() == [0, 1, 0, 2]
    assert head.num_ids == 3
    assert head.kind == ("text", "text")
    with pytest.raises(ValueError, match="num_requests=0"):
        head.head(0)


def test_scaled_is_faster_by_the_factor() -> None:
    scaled = Trace(**fields()).scaled(3.0)
    assert scaled.arrival_s.tolist() == [0.0, 0.5, 0.5]
    assert scaled.block_ids.tolist() == [0, 1, 0, 2, 3]
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="rate_factor"):
            scaled.scaled(factor)


def test_travels_to_another_process() -> None:
    trace = Trace(**fields())
    assert equal(pickle.loads(pickle.dumps(trace)), trace)


@settings(deadline=None)
@given(traces())
def test_parents_are_the_blocks_before(trace: Trace) -> None:
    for row in range(len(trace)):
        blocks = blocks_of(trace, row)
        assert [-1, *blocks[:-1]] == trace.block_parent[blocks].tolist()
