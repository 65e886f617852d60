"""The directory's index: which KV blocks lie in which extent, where its copies are, and which of them go first.

A block's key names its whole prefix. So blocks of an extent that lie on some chain follow each other there too, and one
comparison settles all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kv.extents import ExtentInfo, ExtentSlice
from kv.part_range import LaneRange
from kv.policy.groups import REST
from kv.policy.policy_file import PolicySpec, make_groups, make_policy
from kv.tiers import TIERS, Tier, TierContents


@dataclass(slots=True, eq=False)
class StoreContents:
    """What lies in the tiers of one store, as far as it has any."""

    store_id: str
    tiers: dict[Tier, TierContents] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class StoredExtent:
    """An extent in the index. There may be millions: equal things are shared between them."""

    handle: int
    """Names it to the policies."""
    extent_id: str
    store: StoreContents
    keys: tuple[bytes, ...]
    first_block: int
    lanes: tuple[LaneRange, ...]
    num_bytes: int
    parent: bytes | None
    tiers: tuple[Tier, ...] = ()
    """Where it has copies, fastest first."""
    group: int = REST
    holds: int = 0
    used_s: float = 0.0
    """When it was last used, or came to a tier."""

    @property
    def info(self) -> ExtentInfo:
        """As it was added."""
        return ExtentInfo(
            self.extent_id, self.store.store_id, self.keys, self.first_block, self.lanes, self.num_bytes, self.parent
        )


@dataclass(slots=True)
class Run:
    """Consecutive blocks of a chain that lie in one extent."""

    at_block: int
    """Place of the first one in the chain."""
    extent: StoredExtent
    first: int
    """Its place in the extent."""
    count: int

    @property
    def slice(self) -> ExtentSlice:
        """For a reader."""
        extent = self.extent
        where = (extent.first_block, len(extent.keys), extent.lanes)
        return ExtentSlice(extent.extent_id, extent.store.store_id, self.first, self.count, *where, extent.tiers[0])


class BlockIndex:
    """See the module. Not thread-safe.

    Args:
        policy: how long what is stored stays, and what goes first; in each tier of each store by itself.
    """

    def __init__(self, policy: PolicySpec) -> None:
        self._policy = policy
        self._groups = make_groups(policy)
        self._handles = itertools.count()
        self._by_handle: dict[int, StoredExtent] = {}
        self._by_id: dict[str, StoredExtent] = {}
        self._by_key: dict[bytes, StoredExtent] = {}
        self._lanes: dict[tuple[LaneRange, ...], tuple[LaneRange, ...]] = {}
        self._stores: dict[str, StoreContents] = {}

    # What there is

    def __contains__(self, key: bytes) -> bool:
        """Whether a block is here."""
        return key in self._by_key

    @property
    def num_blocks(self) -> int:
        """That are here."""
        return len(self._by_key)

    def extent(self, extent_id: str) -> StoredExtent | None:
        """The extent of that name, or None."""
        return self._by_id.get(extent_id)

    def extents_of(self, store_id: str) -> list[StoredExtent]:
        """All of a store's extents."""
        return [extent for extent in self._by_id.values() if extent.store.store_id == store_id]

    def in_order(self, store_id: str, tier: Tier, now_s: float) -> list[StoredExtent]:
        """The extents in one tier of a store, in the order in which they would go."""
        return [self._by_handle[handle] for handle in self._tier(store_id, tier).handles(now_s)]

    def bytes_by_store(self) -> dict[str, dict[Tier, int]]:
        """Bytes of the extents of each store that has any, by tier."""
        return {
            store.store_id: {tier: contents.num_bytes for tier, contents in store.tiers.items() if len(contents)}
            for store in self._stores.values()
            if any(map(len, store.tiers.values()))
        }

    def runs(self, keys: Sequence[bytes], start: int = 0) -> Iterator[Run]:
        """What is here of a chain, from its block `start` on; what is not lies between the runs."""
        index = start
        while index < len(keys):
            run = self._run_at(keys, index)
            index += 1 if run is None else run.count
            if run is not None:
                yield run

    def prefix(self, keys: Sequence[bytes], start: int = 0) -> tuple[list[Run], int]:
        """The runs from block `start` on that follow each other, and the place of the block after the last one."""
        found: list[Run] = []
        stop = start
        while stop < len(keys) and (run := self._run_at(keys, stop)) is not None:
            found.append(run)
            stop += run.count
        return found, stop

    # What comes and goes

    def add(self, info: ExtentInfo) -> StoredExtent:
        """Take in an extent none of whose blocks is here. It needs its group (`inherit_groups`) and a copy."""
        extent = StoredExtent(
            next(self._handles),
            info.extent_id,
            self._store(info.store_id),
            info.keys,
            info.first_block,
            self._lanes.setdefault(info.lanes, info.lanes),
            info.num_bytes,
            info.parent,
        )
        self._by_handle[extent.handle] = extent
        self._by_id[extent.extent_id] = extent
        self._by_key.update(dict.fromkeys(extent.keys, extent))
        return extent

    def inherit_groups(self, extents: Iterable[StoredExtent]) -> None:
        """Find the groups of extents without copies, by the blocks before them."""
        # Parents first.
        for extent in sorted(extents, key=lambda extent: extent.first_block):
            parent = None if extent.parent is None else self._by_key.get(extent.parent)
            extent.group = self._groups.group_of(REST if parent is None else parent.group, extent.keys)

    def add_copy(self, extent: StoredExtent, tier: Tier, num_bytes: int, now_s: float) -> None:
        """The extent is in another tier too, where it takes `num_bytes`."""
        extent.tiers = _tiers(frozenset((*extent.tiers, tier)))
        extent.used_s = now_s
        self._tier(extent.store.store_id, tier).add(extent, num_bytes, now_s)

    def remove_copy(self, extent: StoredExtent, tier: Tier) -> None:
        """The extent is in a tier no more; without a copy it is here no more."""
        extent.tiers = _tiers(frozenset(extent.tiers) - {tier})
        extent.store.tiers[tier].remove(extent.handle)
        if not extent.tiers:
            del self._by_id[extent.extent_id]
            del self._by_handle[extent.handle]
            for key in extent.keys:
                del self._by_key[key]

    def remove(self, extent: StoredExtent) -> None:
        """The extent is here no more."""
        for tier in extent.tiers:
            self.remove_copy(extent, tier)

    # Who goes first

    def touch(self, runs: Sequence[Run], now_s: float) -> None:
        """The extents of a chain are used, or put once more."""
        if self._groups.has_roots:
            self._regroup(runs, now_s)
        # Last block first: the root of a chain is always more recent than what hangs on it.
        for run in reversed(runs):
            extent = run.extent
            extent.used_s = now_s
            for tier in extent.tiers:
                extent.store.tiers[tier].use(extent.handle, now_s)

    def victims(self, store_id: str, tier: Tier, need_bytes: int, now_s: float) -> list[StoredExtent] | None:
        """The first to go that nobody holds, until `need_bytes` are free; None when they are not enough."""
        handles = self._tier(store_id, tier).victims(need_bytes, now_s)
        return None if handles is None else [self._by_handle[handle] for handle in handles]

    def next_victim(self, store_id: str, tier: Tier, now_s: float) -> StoredExtent | None:
        """The first to go that nobody holds."""
        handle = self._tier(store_id, tier).first_free(now_s)
        return None if handle is None else self._by_handle[handle]

    def num_bytes(self, store_id: str, tier: Tier) -> int:
        """Bytes of the extents in one tier of a store."""
        return self._tier(store_id, tier).num_bytes

    def free_bytes(self, store_id: str, tier: Tier) -> int:
        """Of these, bytes of what nobody holds."""
        return self._tier(store_id, tier).free_bytes()

    def expired(self, store_id: str, tier: Tier, now_s: float, limit: int) -> list[StoredExtent]:
        """Up to `limit` that have outlived their time-to-live there and that nobody holds."""
        return [self._by_handle[handle] for handle in self._tier(store_id, tier).expired(now_s, limit)]

    def set_policy(self, policy: PolicySpec, now_s: float) -> None:
        """Other rules from now on, for what is here too; it counts as used now, in the order in which it was."""
        self._policy = policy
        self._groups = make_groups(policy)
        self.inherit_groups(self._by_id.values())
        for store in self._stores.values():
            for contents in store.tiers.values():
                contents.replace_policy(make_policy(policy), now_s)

    # How

    def _run_at(self, keys: Sequence[bytes], index: int) -> Run | None:
        """The run that block `index` of a chain begins; None when the block is not here."""
        extent = self._by_key.get(keys[index])
        if extent is None:
            return None
        first = extent.keys.index(keys[index])
        count = min(len(extent.keys) - first, len(keys) - index)
        if extent.keys[first : first + count] != tuple(keys[index : index + count]):
            count = 1
            while extent.keys[first + count] == keys[index + count]:
                count += 1
        return Run(index, extent, first, count)

    def _regroup(self, runs: Sequence[Run], now_s: float) -> None:
        """What was found on a disk may have been added before the block it inherits its group from."""
        group = REST
        for run in runs:
            extent = run.extent
            group = self._groups.group_of(group, extent.keys)
            if group != extent.group:
                extent.group = group
                for tier in extent.tiers:
                    extent.store.tiers[tier].regroup(extent.handle, now_s)

    def _store(self, store_id: str) -> StoreContents:
        return self._stores.setdefault(store_id, StoreContents(store_id))

    def _tier(self, store_id: str, tier: Tier) -> TierContents:
        tiers = self._store(store_id).tiers
        if tier not in tiers:
            tiers[tier] = TierContents(make_policy(self._policy), self._by_handle)
        return tiers[tier]


@functools.cache
def _tiers(tiers: frozenset[Tier]) -> tuple[Tier, ...]:
    """Fastest first. The same object for equal sets."""
    return tuple(tier for tier in TIERS if tier in tiers)
