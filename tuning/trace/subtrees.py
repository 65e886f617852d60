"""The prefixes that most of the reuse is below."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tuning.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Subtree:
    """All blocks that come after one block, and that block."""

    root: int
    """Id of the block."""
    depth_blocks: int
    """Blocks of the prefix up to and with the root."""
    requests: int
    """Requests whose prompts go through the root."""
    blocks: int
    """Different blocks of the subtree."""
    hits: int
    """Uses of them after each one's first."""


def hottest_subtrees(trace: Trace, limit: int) -> list[Subtree]:
    """The subtrees with the most hits, at most `limit`, most first; equal ones by root. They may lie in one another.

    A root is where requests part: a block that all requests of its parent have too is no root of its own.

    Args:
        trace: one with reuse information.
    """
    parent = trace.block_parent
    uses = np.bincount(trace.block_ids)
    depth = _depths(trace)
    blocks, below = np.ones_like(parent), uses.copy()
    by_depth = np.argsort(depth, kind="stable")
    for level in reversed(np.split(by_depth, np.flatnonzero(np.diff(depth[by_depth])) + 1)[1:]):
        np.add.at(blocks, parent[level], blocks[level])
        np.add.at(below, parent[level], below[level])
    parts = (parent == -1) | (uses[parent] > uses)
    roots = np.flatnonzero(parts & (uses > 1))
    hits = below - blocks
    hottest = roots[np.argsort(-hits[roots], kind="stable")][:limit]
    return [
        Subtree(root, int(depth[root]), int(uses[root]), int(blocks[root]), int(hits[root]))
        for root in hottest.tolist()
    ]


def _depths(trace: Trace) -> NDArray[np.int64]:
    """[num_ids] Place of each block in its prompts, from 1."""
    counts = np.diff(trace.block_offsets)
    place = np.arange(1, len(trace.block_ids) + 1) - np.repeat(trace.block_offsets[:-1], counts)
    depth = np.empty(trace.num_ids, dtype=np.int64)
    depth[trace.block_ids] = place
    return depth
