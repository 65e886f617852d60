"""Groups of a trace's blocks: its hottest prefix subtrees, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv.policy.groups import REST
from tuning.trace.subtrees import hottest_subtrees
from tuning.trace.trace import Trace

TRUNK_SHARE = 0.9
"""A subtree with at least so much of all uses is no group: to cut it off from the rest separates next to nothing."""


def group_of_block(trace: Trace, roots: Sequence[int]) -> NDArray[np.int32]:
    """Which group each block of a trace belongs to: that of the deepest root on its chain.

    The rule of `kv.policy.groups.GroupTable`, block by block.

    Args:
        roots: block ids of `trace`. Their groups are numbered from 1 in this order; 0 is the rest.

    Returns:
        Group numbers by block id, [num_ids]. The caller owns them.

    Raises:
        ValueError: a root is no block of the trace, or is given twice.
    """
    group_of_root: dict[int, int] = {}
    for number, root in enumerate(roots, start=1):
        if not 0 <= root < trace.num_ids:
            raise ValueError(f"roots[{number - 1}]={root} is no block of this trace: give 0 to {trace.num_ids - 1}")
        if root in group_of_root:
            raise ValueError(f"root {root} is given twice: give each group a root of its own")
        group_of_root[root] = number
    if not group_of_root:
        return np.zeros(trace.num_ids, np.int32)
    groups: list[int] = []
    # A block is numbered after the one before it, so that one's group is known.
    for block, parent in enumerate(trace.block_parent.tolist()):
        groups.append(group_of_root.get(block) or (groups[parent] if parent >= 0 else REST))
    return np.array(groups, np.int32)


def group_roots(trace: Trace, *, coverage: float, max_groups: int) -> tuple[int, ...]:
    """Roots of the prefix subtrees that are hit most often, hottest first; none lies in another.

    The groups of Kareto (arXiv 2603.08739) are the K most frequently reused subtrees. Which ones these are is ours: the
    hottest that are no trunk. A trunk is a subtree with nearly all uses of the trace (`TRUNK_SHARE`), as below a system
    prompt that all requests begin with: its own blocks stay with the rest, and what is below it is taken apart. K is
    the smallest number of subtrees that have `coverage` of all hits outside the trunks' own blocks. Hits are counted as
    if nothing were ever evicted.

    Args:
        trace: one with reuse information.
        coverage: a share, above 0 and at most 1.
        max_groups: no more than so many, 0 or more, though they cover less.

    Raises:
        ValueError: an option is out of its range.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage={coverage} is not allowed: give a share above 0 and at most 1")
    if max_groups < 0:
        raise ValueError(f"max_groups={max_groups} is not allowed: give 0 or more")
    parents = trace.block_parent.tolist()
    trunk_uses = TRUNK_SHARE * len(trace.block_ids)
    hits_of_root: dict[int, int] = {}
    # A subtree has no fewer hits than one that lies in it, and comes before it.
    for subtree in hottest_subtrees(trace, trace.num_ids):
        if subtree.blocks + subtree.hits >= trunk_uses:
            continue
        above = parents[subtree.root]
        while above >= 0 and above not in hits_of_root:
            above = parents[above]
        if above < 0:
            hits_of_root[subtree.root] = subtree.hits
    enough = coverage * sum(hits_of_root.values())
    covered = 0
    roots: list[int] = []
    for root, hits in hits_of_root.items():
        if covered >= enough or len(roots) == max_groups:
            break
        roots.append(root)
        covered += hits
    return tuple(roots)
