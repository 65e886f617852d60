"""Who owns which KV block of one instance.

The home worker's block manager is the only allocator of block ids (design decision D2): a block id names a logical
block, whatever layers and heads hold its pages. Blocks are shared by reference count, found again by key, and evicted
least recently used. Structure after nano-vllm's block manager; keys come from `kv.keys`, so equal keys mean equal KV.

A block is in exactly one of three states, and the counts add up to `num_blocks` after every call:

    state      referenced by          found by key   leaves it by
    live       one or more sequences  if registered  release of its last holder
    cached     nobody                 yes            share (live again) or eviction (free)
    free       nobody                 no             allocate
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence


class NoFreeBlocksError(Exception):
    """More blocks were asked for than are free or evictable. The caller preempts or waits; nothing was changed."""


class BlockManager:
    """Allocates, shares and finds blocks. Pure bookkeeping: it never sees a tensor."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; a pool needs at least 1 block: raise the KV cache size")
        self._references: list[int] = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._references)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and cached ones nobody refers to."""
        return len(self._free) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that some sequence or export refers to."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks nobody refers to whose content can still be found by key."""
        return len(self._cached)

    def match_prefix(self, keys: Sequence[bytes]) -> list[int]:
        """Block ids of the longest prefix of `keys` that is held here. Takes no reference: `share` before
        allocating."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached_among(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody refers to: sharing those lowers `num_available`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def num_freed_by(self, blocks: Iterable[int]) -> int:
        """By how much `num_available` would grow if `blocks`, each as often as it is given, were released."""
        return sum(1 for block, count in Counter(blocks).items() if self._references[block] == count)

    def share(self, blocks: Sequence[int]) -> None:
        """Takes a reference on each of `blocks`, which must come from `match_prefix` or be live."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks with one reference each, evicting cached blocks as needed, or raises
        NoFreeBlocksError."""
        if count > self.num_available:
            raise NoFreeBlocksError(
                f"{count} blocks were asked for, {self.num_available} of {self.num_blocks} are free"
            )
        blocks = [self._free.pop() if self._free else self._evict_oldest() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each block. The deepest block of a chain becomes the oldest cached one, since a suffix
        without its parents can never be hit (the order vLLM uses)."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, key: bytes) -> None:
        """Makes a live, completely computed block findable. A key that another block holds already stays there."""
        if self._key_of[block] is None and key not in self._block_of:
            self._key_of[block] = key
            self._block_of[key] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds `blocks` any more, because their content is not to be relied on. Cached ones become free."""
        for block in blocks:
            self._forget(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def drop_cached(self, spared: Collection[int] = ()) -> None:
        """Forgets what nobody refers to, but for blocks that are `spared`."""
        self.forget([block for block in self._cached if block not in spared])

    def grow(self, count: int) -> None:
        """Adds `count` free blocks: a lane left, and its slabs were dealt to the others. They are handed out after all
        that are free now, because they are given up first: what is cached in the others outlives the lane's return."""
        first = self.num_blocks
        self._references.extend([0] * count)
        self._key_of.extend([None] * count)
        self._free[:0] = range(first + count - 1, first - 1, -1)

    def shrink(self, count: int) -> None:
        """Gives up the `count` blocks with the highest ids, evicting cached ones; raises NoFreeBlocksError, with
        nothing changed, while a live sequence holds one of them."""
        first = self.num_blocks - count
        if first < 1:
            raise ValueError(f"cannot give up {count} of {self.num_blocks} blocks: at least 1 must stay")
        held = [block for block in range(first, self.num_blocks) if self._references[block]]
        if held:
            raise NoFreeBlocksError(f"{len(held)} of the {count} blocks to give up are held by live requests")
        for block in range(first, self.num_blocks):
            self._forget(block)
            self._cached.pop(block, None)
        self._free = [block for block in self._free if block < first]
        del self._references[first:]
        del self._key_of[first:]

    def live_from(self, first: int) -> list[int]:
        """Live blocks with ids of at least `first`, ascending: those in the way of a pool of `first` blocks."""
        return [block for block in range(first, self.num_blocks) if self._references[block]]

    def plan_shrink(self, num_blocks: int) -> dict[int, int]:
        """Where the live blocks that are in the way of a pool of `num_blocks` would go: to free blocks that stay, then
        to the oldest cached ones. NoFreeBlocksError when they are too many. Changes nothing."""
        moving = self.live_from(num_blocks)
        room = sorted(block for block in self._free if block < num_blocks)
        room += [block for block in self._cached if block < num_blocks]
        if len(moving) > len(room):
            raise NoFreeBlocksError(f"{self.num_live} blocks are held by live requests, {num_blocks} would be left")
        return dict(zip(moving, room, strict=False))

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Live blocks become other blocks, which nobody refers to; what was cached there is evicted. Their holders and
        their pages are the caller's."""
        targets = set(moves.values())
        self._free = [block for block in self._free if block not in targets]
        for source, target in moves.items():
            if target in self._cached:
                del self._cached[target]
                self._forget(target)
                self.num_evictions += 1
            self._references[target], self._references[source] = self._references[source], 0
            key = self._key_of[source]
            if key is not None:
                self._key_of[target], self._key_of[source] = key, None
                self._block_of[key] = target
            self._free.append(source)

    def occupied(self) -> list[int]:
        """Blocks with content that somebody may use, live and cached: what a lane that moves takes along."""
        return [block for block in range(self.num_blocks) if self._references[block] or block in self._cached]

    def findable(self, *, live_only: bool = False) -> list[int]:
        """Those of `occupied` that are full and found by key. Nobody writes to them, so they can be copied at any
        time. `live_only`: those that somebody refers to."""
        return sorted(block for block in self._block_of.values() if not live_only or self._references[block])

    def check_integrity(self) -> None:
        """Raises RuntimeError with both sides of the sum when the states do not add up. Cheap enough to run when
        idle."""
        free, cached = set(self._free), set(self._cached)
        live = {block for block, references in enumerate(self._references) if references > 0}
        parts = len(free) + len(cached) + len(live)
        if parts != self.num_blocks or len(free) != len(self._free) or len(free | cached | live) != self.num_blocks:
            raise RuntimeError(
                f"block pool is inconsistent: {len(free)} free + {len(cached)} cached + {len(live)} live "
                f"is not the {self.num_blocks} blocks of the pool"
            )
        unfindable = [block for block in cached if self._block_of.get(self._key_of[block] or b"") != block]
        if unfindable or any(self._key_of[block] != key for key, block in self._block_of.items()):
            raise RuntimeError(
                f"block pool is inconsistent: keys and blocks disagree, for example for {unfindable[:3]}"
            )

    def _evict_oldest(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._forget(block)
        self.num_evictions += 1
        return block

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
