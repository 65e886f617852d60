"""Device memory: one arena of equal slabs that holds the layers' weights and the KV pages (design decision D2).

A slab is `slab_pages` pages; a page is K and V of one KV head of one layer for `block_tokens` tokens. Weights take runs
of neighbouring slabs, pages take slabs one by one. Whatever leaves - a layer's weights, a lane's pages - gives its
slabs back to one pool, so that moving part of a model away makes room for tokens without asking the device for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from actors.engine.device_memory import zeroed_memory
from kv.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ArenaFullError(Exception):
    """Not enough free (or not enough neighbouring) slabs; nothing was changed."""


class Arena:
    """Owns the memory. `pages` is a view [num_pages, 2, block_tokens, head_dim]: page p is in slab p // slab_pages."""

    def __init__(self, layout: KvLayout, num_slabs: int, slab_pages: int, device: torch.device) -> None:
        self.layout = layout
        self.slab_pages = slab_pages
        self.slab_bytes = slab_pages * layout.page_bytes
        self.num_slabs = num_slabs
        # zeros, not empty: attention multiplies masked positions by zero weights, and 0 * NaN left over in memory is
        # NaN.
        self._memory = zeroed_memory(num_slabs * self.slab_bytes, device)
        self.pages = self._memory.view(TORCH_DTYPES[layout.dtype]).view(
            num_slabs * slab_pages, 2, layout.block_tokens, layout.head_dim
        )
        self._free = set(range(num_slabs))

    @property
    def num_free_slabs(self) -> int:
        """Slabs that hold neither weights nor a lane's pages."""
        return len(self._free)

    @property
    def page_words(self) -> torch.Tensor:
        """The pages as rows of int64, [num_pages, words], the same memory: for copies, which need not know numbers."""
        return page_rows(self.pages)

    def slabs_for(self, num_bytes: int) -> int:
        """Slabs that hold `num_bytes`, rounded up."""
        return -(-num_bytes // self.slab_bytes)

    def take_run(self, num_bytes: int) -> tuple[range, torch.Tensor]:
        """A run of neighbouring slabs and its memory as uint8 [num_bytes]: first fit from the low end. The caller gives
        the range back with `give_back`."""
        count, start = self.slabs_for(num_bytes), 0
        while start + count <= self.num_slabs:
            taken = next((slab for slab in range(start + count - 1, start - 1, -1) if slab not in self._free), None)
            if taken is None:
                run = range(start, start + count)
                return run, self.claim_run(run, num_bytes)
            start = taken + 1
        raise ArenaFullError(
            f"{num_bytes} bytes need {count} neighbouring slabs of {self.slab_bytes} bytes; "
            f"{len(self._free)} of {self.num_slabs} slabs are free, but no such run"
        )

    def claim(self, slabs: Iterable[int]) -> None:
        """Takes these very slabs. ArenaFullError, with nothing changed, when one of them is not free."""
        wanted = set(slabs)
        if not wanted <= self._free:
            raise ArenaFullError(f"slabs {sorted(wanted - self._free)[:8]} were asked for and are not free")
        self._free -= wanted

    def claim_run(self, run: range, num_bytes: int) -> torch.Tensor:
        """Takes this very run and returns its memory as uint8 [num_bytes]. Raises as `claim` does."""
        self.claim(run)
        first = run.start * self.slab_bytes
        return self._memory[first : first + num_bytes]

    def take(self, count: int) -> list[int]:
        """`count` slabs anywhere, highest first, so that runs for weights stay free at the low end."""
        if count > len(self._free):
            raise ArenaFullError(f"{count} slabs were asked for, {len(self._free)} of {self.num_slabs} are free")
        slabs = sorted(self._free, reverse=True)[:count]
        self._free.difference_update(slabs)
        return slabs

    def give_back(self, slabs: Iterable[int]) -> None:
        """Returns slabs to the pool."""
        self._free.update(slabs)

    def is_free(self, slab: int) -> bool:
        """Whether a slab holds neither weights nor a lane's pages."""
        return slab in self._free

    def copy_slabs(self, moves: Mapping[int, int]) -> None:
        """Copies the content of each slab to the one it is mapped to. No slab may be on both sides."""
        slabs = self._memory.view(self.num_slabs, self.slab_bytes)
        for source, target in moves.items():
            slabs[target].copy_(slabs[source])


def page_rows(pages: torch.Tensor) -> torch.Tensor:
    """[pages, words] int64, the same memory: copies of such rows take half the time of those of rows of numbers of two
    bytes in three dimensions."""
    return pages.view(len(pages), -1).view(torch.int64)
