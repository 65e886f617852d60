"""Which slabs each lane of an instance has on this worker (design decision D2).

A lane is (layer, KV head). Logical block b of a lane lies in its slab b // slab_pages, at page b % slab_pages, so one
block table serves every layer and head. All lanes have equally many slabs: capacity is the minimum over lanes, and
free slabs are dealt evenly.

The engine's thread changes a table between steps. Other threads may read it at any time, to copy pages of blocks that
are held for them: a change makes a new map and leaves the old one whole, and the slabs of such blocks stay where they
are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence

import torch

from actors.engine.arena import Arena, ArenaFullError
from actors.engine.transfer import to_device

Lane = tuple[int, int]
"""(layer, KV head)"""
SlabPlace = tuple[Lane, int]
"""A lane's n-th slab."""


class _Map:
    """Slabs by lane, never changed, and the page tables that were asked for."""

    def __init__(self, slabs: dict[Lane, list[int]]) -> None:
        self.slabs = slabs
        self.pages: dict[int, torch.Tensor] = {}
        self.host_pages: dict[int, torch.Tensor] = {}


class LaneTable:
    """Maps lanes to slabs and keeps the page table the attention kernels read."""

    def __init__(self, arena: Arena, lanes: Iterable[Lane], max_blocks: int | None = None) -> None:
        """`max_blocks` caps the capacity: what a hosted instance was granted, tests, and configurations given in
        blocks. Takes the arena's free slabs."""
        self._arena = arena
        self._map = _Map({lane: [] for lane in lanes})
        self._max_blocks = max_blocks
        self.version = 0
        """Goes up whenever the tables of `pages` change: whatever was captured over the old ones is void."""
        self.deal()
        if self._map.slabs and self.num_blocks == 0:
            raise ArenaFullError(
                f"{len(self._map.slabs)} lanes need a slab of {arena.slab_bytes} bytes each, {arena.num_free_slabs} "
                "slabs are free: raise the KV cache size or lower slab_pages"
            )

    @property
    def lanes(self) -> KeysView[Lane]:
        """Lanes held here."""
        return self._map.slabs.keys()

    @property
    def slabs_each(self) -> int:
        """Slabs of every lane; 0 without lanes."""
        return min((len(slabs) for slabs in self._map.slabs.values()), default=0)

    @property
    def num_blocks(self) -> int:
        """Blocks every lane can hold."""
        blocks = self.slabs_each * self._arena.slab_pages
        return blocks if self._max_blocks is None else min(blocks, self._max_blocks)

    def places(self) -> Iterator[tuple[SlabPlace, int]]:
        """Every slab of every lane."""
        for lane, slabs in self._map.slabs.items():
            for index, slab in enumerate(slabs):
                yield (lane, index), slab

    def heads(self, layer: int) -> list[int]:
        """KV heads of `layer` held here, ascending."""
        return _heads(self._map, layer)

    def pages(self, layer: int) -> torch.Tensor:
        """Page ids of `layer`'s lanes, int64 [heads held here, capacity in blocks], rows in the order of `heads`."""
        current = self._map  # another thread's call must not store what it read before a change for those after it
        if layer not in current.pages:
            current.pages[layer] = to_device(self._host_pages(current, layer), self._arena.pages.device)
        return current.pages[layer]

    def host_pages(self, layer: int) -> torch.Tensor:
        """The same in host memory, for other threads than the engine's: asking the device would wait for it."""
        return self._host_pages(self._map, layer)

    def _host_pages(self, current: _Map, layer: int) -> torch.Tensor:
        if layer not in current.host_pages:
            rows = [current.slabs[layer, head] for head in _heads(current, layer)]
            slabs = torch.tensor(rows, dtype=torch.int64)
            offsets = torch.arange(self._arena.slab_pages, dtype=torch.int64)
            current.host_pages[layer] = (slabs[:, :, None] * self._arena.slab_pages + offsets).flatten(1)
        return current.host_pages[layer]

    def deal(self) -> int:
        """Deals the arena's free slabs evenly to the lanes; returns by how many blocks the capacity grew."""
        before = self.num_blocks
        share = self._arena.num_free_slabs // len(self._map.slabs) if self._map.slabs else 0
        if self._max_blocks is not None:
            share = min(share, -(-self._max_blocks // self._arena.slab_pages) - self.slabs_each)
        if share > 0:
            slabs = iter(self._arena.take(share * len(self._map.slabs)))
            self._replace(
                {lane: [*mine, *(next(slabs) for _ in range(share))] for lane, mine in self._map.slabs.items()}
            )
        return self.num_blocks - before

    def depart(self, lanes: Iterable[Lane]) -> int:
        """Takes lanes away (their KV has been copied to another worker) and deals their slabs to the remaining ones.
        Returns by how many blocks the capacity grew: the block manager grows by as many."""
        before = self.num_blocks
        self.remove(lanes)
        self._max_blocks = None  # a cap was for the lanes that shared the memory before
        self.deal()
        return self.num_blocks - before

    def remove(self, lanes: Iterable[Lane]) -> None:
        """Takes lanes away; their slabs go back to the arena."""
        gone = set(lanes)
        self._arena.give_back([slab for lane in gone for slab in self._map.slabs[lane]])
        self._replace({lane: slabs for lane, slabs in self._map.slabs.items() if lane not in gone})

    def add(self, lanes: Iterable[Lane], max_blocks: int) -> None:
        """Adds lanes and raises the cap to `max_blocks`: every lane, new or not, has slabs for so many blocks then.
        ArenaFullError, with nothing changed, when too few are free."""
        grown = {lane: list[int]() for lane in lanes} | self._map.slabs
        each = -(-max_blocks // self._arena.slab_pages)
        slabs = iter(self._arena.take(sum(each - len(mine) for mine in grown.values())))
        self._max_blocks = max_blocks
        self._replace({lane: [*mine, *(next(slabs) for _ in range(each - len(mine)))] for lane, mine in grown.items()})

    def give_up(self, slabs_each: int) -> None:
        """Gives the last `slabs_each` slabs of every lane back to the arena. The block manager has shrunk before."""
        if slabs_each == 0:
            return
        self._arena.give_back([slab for slabs in self._map.slabs.values() for slab in slabs[-slabs_each:]])
        self._replace({lane: slabs[:-slabs_each] for lane, slabs in self._map.slabs.items()})

    def cut(self, max_blocks: int) -> None:
        """Lowers the cap to `max_blocks`; slabs beyond it go back to the arena. Whoever has the blocks has given up
        those beyond before."""
        if max_blocks < self.num_blocks:
            self.give_up(self.slabs_each - -(-max_blocks // self._arena.slab_pages))
            self._max_blocks = max_blocks

    def adopt(self, other: LaneTable, lanes: Iterable[Lane]) -> None:
        """Takes lanes over from another table of the same arena, with what lies in their pages. Slabs that other lanes
        have beyond the shortest one's go back."""
        moved = {lane: other._map.slabs[lane] for lane in lanes}
        other._replace({lane: slabs for lane, slabs in other._map.slabs.items() if lane not in moved})
        merged = self._map.slabs | moved
        each = min(len(slabs) for slabs in merged.values())
        self._arena.give_back([slab for slabs in merged.values() for slab in slabs[each:]])
        self._replace({lane: slabs[:each] for lane, slabs in merged.items()})

    def relocate(self, moves: Mapping[SlabPlace, int]) -> None:
        """These slabs' content lies elsewhere from now on; the caller has copied it and sees to the arena's books."""
        self._replace(
            {
                lane: [moves.get((lane, index), slab) for index, slab in enumerate(slabs)]
                for lane, slabs in self._map.slabs.items()
            }
        )

    def copy_blocks(self, moves: Mapping[int, int]) -> None:
        """Copies the pages of blocks, in all lanes, to those of the blocks they are mapped to. No block may be on both
        sides."""
        if moves and self._map.slabs:
            words = self._arena.page_words
            words.index_copy_(0, self.page_index(list(moves.values())), words[self.page_index(list(moves))])

    def clear_blocks(self, blocks: Sequence[int], layers: Iterable[int] | None = None) -> None:
        """Zeroes the pages of blocks in the lanes of `layers`, or in all lanes."""
        if blocks and self._map.slabs:
            self._arena.page_words.index_fill_(0, self.page_index(blocks, layers), 0)

    def page_index(self, blocks: Sequence[int], layers: Iterable[int] | None = None) -> torch.Tensor:
        """int64 [lanes * blocks] pages of `blocks`, lane by lane in ascending order."""
        device = self._arena.pages.device
        columns = to_device(torch.tensor(blocks, dtype=torch.int64), device)
        chosen = sorted({layer for layer, _ in self._map.slabs}) if layers is None else layers
        return torch.cat([self.pages(layer)[:, columns].flatten() for layer in chosen])

    def _replace(self, slabs: dict[Lane, list[int]]) -> None:
        self._map = _Map(slabs)
        self.version += 1


def _heads(current: _Map, layer: int) -> list[int]:
    return sorted(head for lane_layer, head in current.slabs if lane_layer == layer)
