"""Chains of blocks that share beginnings, as conversations under a few system prompts do, and the extents they are
stored in. Keys are drawn, not hashed. Pure: no clock, no I/O.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from kv.extents import ExtentInfo
from kv.part_range import LaneRange
from kv.shards import root_digits

BLOCK_BYTES = 360 * 1024
"""16 tokens of a model of a billion parameters. What the bytes are does not matter to an index."""
STORE_ID = "5a0c2f9e4b7d1836a0c2f9e4b7d1836a0c2f9e4b7d1836a0c2f9e4b7"
"""As long as the id of a Ray node."""
_LANES = (LaneRange(0, 16, 0, 8),)
"""One part an extent."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One conversation. The blocks before `first_own` are those of its root."""

    keys: tuple[bytes, ...]
    first_own: int
    extents: tuple[ExtentInfo, ...]
    """Of the blocks that no chain before it brought."""


class BlockForest:
    """Endlessly many chains of `chain_blocks` blocks. Each begins with one of `num_roots` roots, the one of rank r in
    proportion to 1/r, and goes on with blocks of its own.

    Args:
        extent_blocks: fewest and most blocks of an extent; the last one of a chain may have fewer.
        root_blocks: fewest and most blocks of a root.
    """

    def __init__(
        self,
        seed: int,
        *,
        chain_blocks: int = 250,
        extent_blocks: tuple[int, int] = (10, 30),
        num_roots: int = 20,
        root_blocks: tuple[int, int] = (50, 150),
    ) -> None:
        self._rng = random.Random(f"forest/{seed}")
        self._chain_blocks = chain_blocks
        self._extent_blocks = extent_blocks
        self._roots = [self._keys(self._rng.randint(*root_blocks)) for _ in range(num_roots)]
        self._cumulative = list(itertools.accumulate(1 / rank for rank in range(1, num_roots + 1)))
        self._stored_roots: set[bytes] = set()

    def new_prompt(self) -> tuple[tuple[bytes, ...], int]:
        """Keys of a chain that is not stored, and how many of them are its root's."""
        root = self._rng.choices(self._roots, cum_weights=self._cumulative)[0]
        return (*root, *self._keys(self._chain_blocks - len(root))), len(root)

    def chains(self, num_blocks: int) -> Iterator[Chain]:
        """Chains that bring exactly so many blocks together; the last one is cut."""
        while num_blocks > 0:
            keys, first_own = self.new_prompt()
            first_new = first_own if keys[0] in self._stored_roots else 0
            keys = keys[: first_new + num_blocks]
            self._stored_roots.add(keys[0])
            num_blocks -= len(keys) - first_new
            yield Chain(keys, first_own, tuple(self._extents(keys, first_new)))

    def _keys(self, count: int) -> tuple[bytes, ...]:
        return tuple(self._rng.randbytes(32) for _ in range(count))

    def _extents(self, keys: tuple[bytes, ...], start: int) -> Iterator[ExtentInfo]:
        while start < len(keys):
            stop = min(len(keys), start + self._rng.randint(*self._extent_blocks))
            extent_id = f"{STORE_ID}/{self._rng.randbytes(12).hex()}{root_digits(keys[0])}"
            parent = keys[start - 1] if start else None
            yield ExtentInfo(extent_id, STORE_ID, keys[start:stop], start, _LANES, (stop - start) * BLOCK_BYTES, parent)
            start = stop
