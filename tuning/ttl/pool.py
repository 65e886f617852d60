"""What an eviction policy makes of a trace in a pool of so many blocks."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from kv.policy.interface import EvictionPolicy
from tuning.ttl.uses import BlockUses


def pool_reuse_ratio(
    uses: BlockUses,
    policy: EvictionPolicy,
    group_of_block: NDArray[np.int32],
    capacity_blocks: int,
    first_request: int = 0,
) -> float:
    """Share of block uses that find their block and all blocks before it in their request.

    Requests are served one after another and take no time. Each finds what has not expired, then all its blocks are
    stored or used, the last one first, as the live store does it; then what is too much goes.

    Args:
        policy: an empty one of `kv.policy`. It is filled.
        group_of_block: groups that `policy` knows, by block id.
        capacity_blocks: 0 or more.
        first_request: count this request and those after it, which use a block. The others have only filled the pool.

    Raises:
        ValueError: `capacity_blocks` is below 0.
    """
    if capacity_blocks < 0:
        raise ValueError(f"capacity_blocks={capacity_blocks} is not allowed: give 0 or more")
    offsets: list[int] = uses.request_offsets.tolist()
    ids: list[int] = uses.block_ids.tolist()
    groups = group_of_block.tolist()
    times_s = uses.used_s.tolist()
    here: set[int] = set()
    hits = 0
    for request, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        now_s = times_s[start]
        for block in policy.expired(now_s, len(policy)):
            policy.remove(block)
            here.remove(block)
        blocks = ids[start:end]
        if request >= first_request:
            for block in blocks:
                if block not in here:
                    break
                hits += 1
        for block in reversed(blocks):
            if block in here:
                policy.use(block, now_s)
            else:
                policy.insert(block, groups[block], now_s)
                here.add(block)
        if len(policy) > capacity_blocks:
            for block in list(islice(policy.victims(now_s), len(policy) - capacity_blocks)):
                policy.remove(block)
                here.remove(block)
    return hits / (offsets[-1] - offsets[first_request])
