"""Ids that stand for prefixes, made of hashes that may stand for the content of a block alone.

KV can be used again only after the same prefix, so two equal blocks after different ones are two. Hashes of prefixes
come out as they went in, but for their numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def prefix_ids(offsets: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """An id for each block of each request: equal for two blocks just when all hashes up to them are equal.

    Goes through all requests at once, block by block, and leaves a request alone as soon as no other shares its prefix.

    Args:
        offsets: [N + 1] request i has `hashes[offsets[i]:offsets[i + 1]]`.
        hashes: [offsets[N]] any numbers.

    Returns:
        [offsets[N]] ids from 0, numbered by first appearance. The caller owns it.
    """
    total = len(hashes)
    codes, num_codes = _small_codes(hashes)
    starts, ends = offsets[:-1], offsets[1:]
    ids = np.empty(total, dtype=np.int64)
    num_ids = 0
    # Marks where requests begin (+1) and stop (-1) to have blocks that nobody shares.
    alone = np.zeros(total + 1, dtype=np.int64)

    active = np.flatnonzero(ends > starts)
    prefix = np.zeros(len(active), dtype=np.int64)
    depth = 0
    while len(active):
        at = starts[active] + depth
        # Both factors are below 2**31, so this names the pair of prefix and block.
        _, prefix, requests = np.unique(prefix * num_codes + codes[at], return_inverse=True, return_counts=True)
        ids[at] = num_ids + prefix
        num_ids += len(requests)
        depth += 1
        goes_on = starts[active] + depth < ends[active]
        shared = requests[prefix] > 1
        leaves = active[goes_on & ~shared]
        alone[starts[leaves] + depth] += 1
        alone[ends[leaves]] -= 1
        active, prefix = active[goes_on & shared], prefix[goes_on & shared]

    unshared = np.cumsum(alone[:-1]) > 0
    ids[unshared] = np.arange(num_ids, num_ids + np.count_nonzero(unshared))
    return by_first_appearance(ids)


def by_first_appearance(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids renumbered from 0 in the order in which they appear.

    Args:
        ids: [n] from 0; not every number up to the highest needs to occur.

    Returns:
        [n] the caller owns it.
    """
    if len(ids) == 0:
        return ids.copy()
    first = np.full(int(ids.max()) + 1, len(ids))
    # Of several values for one place the last stays: going backwards, that of the first appearance.
    first[ids[::-1]] = np.arange(len(ids) - 1, -1, -1)
    number = np.empty_like(first)
    number[np.argsort(first)] = np.arange(len(first))
    renumbered: NDArray[np.int64] = number[ids]
    return renumbered


def _small_codes(hashes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Numbers below the returned one, which is at most 2**31, equal just where the hashes are."""
    if len(hashes) and hashes.min() >= 0 and hashes.max() < 2**31 - 1:
        return hashes, int(hashes.max()) + 1
    distinct, codes = np.unique(hashes, return_inverse=True)
    return codes, len(distinct)
