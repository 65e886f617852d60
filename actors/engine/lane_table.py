"""Which slabs each lane of an instance has on this worker (design decision D2).

A lane is (layer, KV head). Logical block b of a lane lies in its slab b // slab_pages, at page b % slab_pages, so one
block table serves every layer and head. All lanes have equally many slabs: capacity is the minimum over lanes, and
free slabs are dealt evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from actors.engine.arena import Arena, ArenaFullError
from actors.engine.transfer import to_device

Lane = tuple[int, int]
"""(layer, KV head)"""


class LaneTable:
    """Maps lanes to slabs and keeps the page table the attention kernels read."""

    def __init__(self, arena: Arena, lanes: Iterable[Lane], max_blocks: int | None = None) -> None:
        """`max_blocks` caps the capacity (tests, and configurations given in blocks). Takes the arena's free slabs."""
        self._arena = arena
        self._slabs: dict[Lane, list[int]] = {lane: [] for lane in lanes}
        self._max_slabs = None if max_blocks is None else -(-max_blocks // arena.slab_pages)
        self._max_blocks = max_blocks
        self._pages: dict[int, torch.Tensor] = {}
        self._host_pages: dict[int, torch.Tensor] = {}
        self.version = 0
        """Goes up whenever the tables of `pages` change: whatever was captured over the old ones is void."""
        self.deal()
        if self.num_blocks == 0:
            raise ArenaFullError(
                f"{len(self._slabs)} lanes need a slab of {arena.slab_bytes} bytes each, {arena.num_free_slabs} "
                "slabs are free: raise the KV cache size or lower slab_pages"
            )

    @property
    def lanes(self) -> Collection[Lane]:
        """Lanes held here."""
        return self._slabs.keys()

    @property
    def num_blocks(self) -> int:
        """Blocks every lane can hold."""
        blocks = min((len(slabs) for slabs in self._slabs.values()), default=0) * self._arena.slab_pages
        return blocks if self._max_blocks is None else min(blocks, self._max_blocks)

    def heads(self, layer: int) -> list[int]:
        """KV heads of `layer` held here, ascending."""
        return sorted(head for lane_layer, head in self._slabs if lane_layer == layer)

    def pages(self, layer: int) -> torch.Tensor:
        """Page ids of `layer`'s lanes, int64 [heads held here, capacity in blocks], rows in the order of `heads`."""
        if layer not in self._pages:
            self._pages[layer] = to_device(self.host_pages(layer), self._arena.pages.device)
        return self._pages[layer]

    def host_pages(self, layer: int) -> torch.Tensor:
        """The same in host memory, for other threads than the engine's: asking the device would wait for it."""
        if layer not in self._host_pages:
            rows = [self._slabs[layer, head] for head in self.heads(layer)]
            slabs = torch.tensor(rows, dtype=torch.int64)
            offsets = torch.arange(self._arena.slab_pages, dtype=torch.int64)
            self._host_pages[layer] = (slabs[:, :, None] * self._arena.slab_pages + offsets).flatten(1)
        return self._host_pages[layer]

    def deal(self) -> int:
        """Deals the arena's free slabs evenly to the lanes; returns by how many blocks the capacity grew."""
        before = self.num_blocks
        share = self._arena.num_free_slabs // len(self._slabs) if self._slabs else 0
        if self._max_slabs is not None:
            share = min(share, self._max_slabs - min((len(s) for s in self._slabs.values()), default=0))
        if share > 0:
            slabs = iter(self._arena.take(share * len(self._slabs)))
            for mine in self._slabs.values():
                mine.extend(next(slabs) for _ in range(share))
            self._forget_pages()
        return self.num_blocks - before

    def depart(self, lanes: Iterable[Lane]) -> int:
        """Takes lanes away (their KV has been copied to another worker) and deals their slabs to the remaining ones.
        Returns by how many blocks the capacity grew: the block manager grows by as many."""
        before = self.num_blocks
        for lane in list(lanes):
            self._arena.give_back(self._slabs.pop(lane))
        self._forget_pages()
        self._max_slabs = self._max_blocks = None  # a cap was for the lanes that shared the memory before
        self.deal()
        return self.num_blocks - before

    def _forget_pages(self) -> None:
        self._pages.clear()
        self._host_pages.clear()
        self.version += 1
