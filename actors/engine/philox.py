"""Counter-based random numbers: one uniform per sampled token, with no generator state to carry (decision D5).

Philox 4x32-10 from J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011) and its library Random123. A block is a function of key and counter alone, so a sequence that is handed over,
moved or resumed draws the same numbers wherever it runs and whatever runs beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_KEY_STEP_0 = np.uint64(0x9E3779B9)
_KEY_STEP_1 = np.uint64(0xBB67AE85)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)
_DROPPED_BITS = np.uint64(11)
"""64 random bits less the 53 that a float64 in [0, 1) can hold evenly spaced."""


def philox4x32(counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Ten rounds of Philox 4x32 on each row: counters [B, 4] and keys [B, 2], both uint32, give uint32 [B, 4].

    Words stand in the order of Random123's arrays (word 0 first). Inputs are not changed.
    """
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT_32) ^ c1 ^ k0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ k1,
            product_0 & _LOW_32,
        )
        k0 = (k0 + _KEY_STEP_0) & _LOW_32
        k1 = (k1 + _KEY_STEP_1) & _LOW_32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniforms(seeds: Sequence[int], choice_indices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One float64 in [0, 1) with 53 random bits per row, a pure function of that row's three integers.

    Layout (ours; changing it changes every seeded answer): the key is the seed's low and high word, the counter is
    (position low, position high, choice index low, choice index high), and the number is the top 53 bits of
    `word_1 << 32 | word_0`.

    Args:
        seeds: B integers, each taken modulo 2**64, so that -1 and 2**64 - 1 are one seed.
        choice_indices: B integers from 0, which of a prompt's `n` choices.
        positions: B integers from 0, the index of the token within the answer.

    Raises:
        ValueError: the three do not have one length, or an index or a position is negative.
    """
    rows = len(seeds)
    if len(choice_indices) != rows or len(positions) != rows:
        raise ValueError(
            f"uniforms needs one seed, choice index and position a row; got {rows} seeds, "
            f"{len(choice_indices)} choice indices and {len(positions)} positions"
        )
    if rows == 0:
        return np.empty(0, dtype=np.float64)
    if min(choice_indices) < 0 or min(positions) < 0:
        raise ValueError("choice indices and positions count from 0; got a negative one")
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    choice = np.array(choice_indices, dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    counters = np.stack([position & _LOW_32, position >> _SHIFT_32, choice & _LOW_32, choice >> _SHIFT_32], axis=1)
    keys = np.stack([seed & _LOW_32, seed >> _SHIFT_32], axis=1)
    words = philox4x32(counters.astype(np.uint32), keys.astype(np.uint32)).astype(np.uint64)
    bits = (words[:, 1] << _SHIFT_32 | words[:, 0]) >> _DROPPED_BITS
    return bits.astype(np.float64) * 2.0**-53
