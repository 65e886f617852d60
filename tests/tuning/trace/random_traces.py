"""Small random traces for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tuning.trace.prefix_ids import prefix_ids
from tuning.trace.trace import Trace


@st.composite
def traces(draw: st.DrawFn, max_requests: int = 12) -> Trace:
    """Requests over few contents, so that prefixes meet and part; with equal times, and with full last blocks too."""
    count = draw(st.integers(1, max_requests))
    size = draw(st.integers(1, 5))
    contents = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=5)) for _ in range(count)]
    gaps_ms = draw(st.lists(st.sampled_from((0, 1, 250, 60_000)), min_size=count, max_size=count))
    last = draw(st.lists(st.integers(1, size), min_size=count, max_size=count))
    offsets = np.concatenate(([0], np.cumsum([len(blocks) for blocks in contents])))
    parents = [draw(st.integers(-1, row - 1)) for row in range(count)]
    return Trace(
        name="random",
        arrival_s=np.cumsum([0, *gaps_ms[1:]]) / 1000,
        input_tokens=np.array([(len(blocks) - 1) * size + rest for blocks, rest in zip(contents, last, strict=True)]),
        output_tokens=np.array(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))),
        block_tokens=size,
        block_offsets=offsets,
        block_ids=prefix_ids(offsets, np.concatenate([np.array(blocks) for blocks in contents])),
        parent_request=np.array(parents),
        turn=np.array(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)), dtype=np.int32),
        kind=tuple(draw(st.sampled_from(((), ("text",) * count)))),
    )


def equal(one: Trace, other: Trace) -> bool:
    """Whether two traces say the same, but for their names."""
    arrays = ("arrival_s", "input_tokens", "output_tokens", "block_offsets", "block_ids", "parent_request", "turn")
    return (
        one.block_tokens == other.block_tokens
        and one.kind == other.kind
        and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays)
    )


def blocks_of(trace: Trace, row: int) -> list[int]:
    """Ids of a request's blocks."""
    ids: list[int] = trace.block_ids[trace.block_offsets[row] : trace.block_offsets[row + 1]].tolist()
    return ids
