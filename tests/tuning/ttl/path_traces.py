"""Traces written down as the paths of their prompts through a tree of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tuning.trace.trace import Trace


def path_trace(*requests: tuple[float, str], partial: Sequence[int] = ()) -> Trace:
    """A trace of blocks of two tokens; each block's content is a letter, so "abc" shares two blocks with "abd".

    Args:
        requests: arrival in seconds, and the letters of the prompt.
        partial: rows whose last block holds one token only.
    """
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(path[:end], len(numbers)) for _, path in requests for end in range(1, len(path) + 1)]
    return Trace(
        name="paths",
        arrival_s=np.array([arrival_s for arrival_s, _ in requests], np.float64),
        input_tokens=np.array([2 * len(path) - (row in partial) for row, (_, path) in enumerate(requests)]),
        output_tokens=np.ones(len(requests), np.int64),
        block_tokens=2,
        block_offsets=np.array([0, *itertools.accumulate(len(path) for _, path in requests)]),
        block_ids=np.array(ids),
        parent_request=np.full(len(requests), -1),
        turn=np.ones(len(requests), np.int32),
    )


def block_id(trace: Trace, row: int, place: int) -> int:
    """Id of a request's block, counted from 0."""
    return int(trace.block_ids[trace.block_offsets[row] + place])
