"""The directory: which KV blocks exist, in which store and tier, and who holds them. Metadata only; time comes in as
`now_s`.

    begin_put -> (commit_put | abort_put | expiry)      a block is visible only after the commit of its extent
    lookup    -> renew* -> (release | expiry)           an extent with a hold on it is never evicted
    add_copy  <-> (evict | expire)                      an extent whose last copy is gone is a miss
    adopt                                               what a store found on its disk is visible again

A put holds the visible extents of its chain just as a lease does, so that making room for a suffix never throws out its
own prefix. The two-step put, the lease taken by the lookup itself and the expiry of both follow Mooncake Store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv.extents import Copy, ExtentInfo, ExtentSlice, Lookup, PutTicket
from kv.holds import Hold, HoldTable, Put
from kv.policy.groups import REST
from kv.policy.policy_file import PolicySpec, make_policy
from kv.tiers import TIERS, Tier, TierContents


@dataclass(slots=True)
class DirectoryCounters:
    """Counts since the start."""

    queries: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    hit_blocks_disk: int = 0
    """Of these, those that only a disk had."""
    leases_granted: int = 0
    leases_expired: int = 0
    puts_committed: int = 0
    puts_aborted: int = 0
    puts_expired: int = 0
    puts_refused: int = 0
    """Commits that came too late or did not fit their put."""
    extents_adopted: int = 0
    adoptions_refused: int = 0
    """Extents found on a disk whose blocks are visible elsewhere, or being put."""
    dram_evicted: int = 0
    """Copies that went to make room; so `disk_evicted`."""
    disk_evicted: int = 0
    dram_expired: int = 0
    """Copies that outlived their time-to-live; so `disk_expired`."""
    disk_expired: int = 0
    extents_broken: int = 0
    """Dropped because a part was damaged or gone."""
    extents_lost: int = 0
    """Dropped with their store."""
    evictions_refused: int = 0
    """Demands for room that could not be met because too much is held."""


@dataclass(slots=True)
class _Extent:
    handle: int
    info: ExtentInfo
    group: int = REST
    tiers: set[Tier] = field(default_factory=set)
    holds: int = 0


class Directory:
    """See the module. Not thread-safe.

    Args:
        first_id: leases and puts are numbered from here. A directory that replaces a lost one starts elsewhere, so that
            ids given out by the lost one mean nothing to it.
        policy: how long what is stored stays, and what goes first; in each tier of each store by itself.
    """

    def __init__(self, first_id: int = 1, policy: PolicySpec | None = None) -> None:
        self.counters = DirectoryCounters()
        self._policy = PolicySpec() if policy is None else policy
        self._groups = make_policy(self._policy)[1]
        self._handles = itertools.count()
        self._by_handle: dict[int, _Extent] = {}
        self._extents: dict[str, _Extent] = {}
        self._blocks: dict[bytes, _Extent] = {}
        self._stores: dict[str, dict[Tier, TierContents]] = {}
        self._holds = HoldTable(first_id, self._count_expiry)

    # Reading

    def match_blocks(self, keys: Sequence[bytes]) -> int:
        """Length in blocks of the longest visible prefix. Takes no lease and changes nothing."""
        return self._matched(keys, 0)

    def lookup(self, keys: Sequence[bytes], now_s: float, lease_s: float, skip_blocks: int = 0) -> Lookup:
        """Find the longest visible prefix and lease every extent returned, in one step.

        Args:
            keys: the chain of the request, from its first block.
            lease_s: the lease ends so many seconds from now unless renewed.
            skip_blocks: so many first blocks are with the caller already; they are neither returned nor leased and need
                not be visible.

        Raises:
            ValueError: `skip_blocks` is not in 0..len(keys).
        """
        if not 0 <= skip_blocks <= len(keys):
            raise ValueError(f"skip_blocks={skip_blocks} is not allowed: give 0 to {len(keys)}, the number of keys")
        self.sweep(now_s)
        num_blocks = self._matched(keys, skip_blocks)
        extents: list[_Extent] = []
        slices: list[ExtentSlice] = []
        index = skip_blocks
        while index < num_blocks:
            extent = self._blocks[keys[index]]
            info = extent.info
            first = info.keys.index(keys[index])
            # The blocks of a chain that lie in one extent are consecutive there too.
            count = min(len(info.keys) - first, num_blocks - index)
            while info.keys[first + count - 1] != keys[index + count - 1]:
                count -= 1
            tier = next(tier for tier in TIERS if tier in extent.tiers)
            extents.append(extent)
            where = (info.first_block, len(info.keys), info.lanes)
            slices.append(ExtentSlice(info.extent_id, info.store_id, first, count, *where, tier))
            index += count
            self.counters.hit_blocks_disk += count if tier == "disk" else 0

        self.counters.queries += 1
        self.counters.queried_blocks += len(keys) - skip_blocks
        self.counters.hit_blocks += num_blocks - skip_blocks
        self._touch(keys[:num_blocks], now_s)
        if not slices:
            return Lookup(None, (), num_blocks)
        self.counters.leases_granted += 1
        return Lookup(self._holds.add(Hold(now_s + lease_s, tuple(extents))), tuple(slices), num_blocks)

    def renew(self, lease_ids: Iterable[int], now_s: float, lease_s: float) -> list[int]:
        """Let leases last at least `lease_s` from now.

        Returns:
            Those that were renewed. The others had ended already, and what they held may be gone.
        """
        renewed = []
        for lease_id in lease_ids:
            lease = self._holds.lease(lease_id)
            if lease is not None and now_s < lease.expires_s:
                lease.expires_s = max(lease.expires_s, now_s + lease_s)
                renewed.append(lease_id)
        self.sweep(now_s)
        return renewed

    def release(self, lease_id: int) -> None:
        """End a lease. One that has ended already is no error."""
        if self._holds.lease(lease_id) is not None:
            self._holds.end(lease_id)

    # Writing

    def begin_put(self, keys: Sequence[bytes], now_s: float, ttl_s: float) -> PutTicket:
        """Announce the blocks of a chain. Those of them that nobody has or brings are the caller's to put.

        Args:
            keys: the chain of the request, from its first block.
            ttl_s: a put that is not committed within this time is forgotten.
        """
        self.sweep(now_s)
        self._touch(keys, now_s)
        pending = sum(self._holds.is_pending(key) for key in keys)
        missing: list[tuple[int, int]] = []
        index = 0
        for known, group in itertools.groupby(keys, key=lambda key: key in self._blocks or self._holds.is_pending(key)):
            stop = index + sum(1 for _ in group)
            if not known:
                missing.append((index, stop))
            index = stop
        if not missing:
            return PutTicket(None, (), pending)

        missing_keys = frozenset(key for start, stop in missing for key in keys[start:stop])
        visible = {id(self._blocks[key]): self._blocks[key] for key in keys if key in self._blocks}
        put = Put(now_s + ttl_s, tuple(visible.values()), tuple(keys), missing_keys)
        return PutTicket(self._holds.add(put), tuple(missing), pending)

    def commit_put(self, put_id: int, extents: Sequence[ExtentInfo], now_s: float) -> bool:
        """Make extents visible, in DRAM, and end the put. Announced blocks that are in none of them are free to be put
        again.

        Returns:
            False when nothing was made visible, because the put has expired or the extents do not belong to it.
            The caller keeps, and frees, what it stored.
        """
        put = self._holds.put(put_id)
        if put is None:
            self.counters.puts_refused += 1
            return False
        keys = [key for info in extents for key in info.keys]
        in_time = now_s < put.expires_s
        fits = len(set(keys)) == len(keys) and put.missing.issuperset(keys)
        fresh = len({info.extent_id for info in extents} - self._extents.keys()) == len(extents)
        self._holds.end(put_id)
        if not (in_time and fits and fresh):
            self.counters.puts_refused += 1
            return False
        for info in extents:
            extent = self._list(info)
            extent.group = self._group_of(info)
            self._put_in_tier(extent, "dram", info.num_bytes, now_s)
        self._touch(put.chain, now_s)
        self.counters.puts_committed += 1
        return True

    def abort_put(self, put_id: int) -> None:
        """End a put without making anything visible. One that has ended already is no error."""
        if self._holds.put(put_id) is not None:
            self._holds.end(put_id)
            self.counters.puts_aborted += 1

    def has_pending(self, keys: Iterable[bytes]) -> bool:
        """Whether a live put will bring any of these blocks."""
        return self._holds.any_pending(keys)

    def adopt(self, copies: Sequence[Copy], now_s: float) -> list[str]:
        """Make extents visible that a store has without a put: found on its disk, moved there from DRAM, or unknown to
        a directory that was restarted. One that is listed already gets another copy.

        Returns:
            Ids of those that were not, for the store to free: some of their blocks are visible in other extents, or
            being put.
        """
        self.sweep(now_s)
        refused = []
        added: list[tuple[_Extent, Copy]] = []
        for copy in copies:
            keys = copy.info.keys
            if self.add_copy(copy.info.extent_id, copy.tier, copy.num_bytes, now_s):
                continue
            if self._holds.any_pending(keys) or any(key in self._blocks for key in keys):
                refused.append(copy.info.extent_id)
            else:
                added.append((self._list(copy.info), copy))
        # Parents first, since a group is inherited; the order of the copies is that of their use.
        for extent, _ in sorted(added, key=lambda item: item[0].info.first_block):
            extent.group = self._group_of(extent.info)
        for extent, copy in added:
            self._put_in_tier(extent, copy.tier, copy.num_bytes, now_s)
        self.counters.extents_adopted += len(added)
        self.counters.adoptions_refused += len(refused)
        return refused

    def add_copy(self, extent_id: str, tier: Tier, num_bytes: int, now_s: float) -> bool:
        """An extent is in another tier of its store too. False when it is not listed (any more): the copy is to be
        freed."""
        extent = self._extents.get(extent_id)
        if extent is None:
            return False
        if tier not in extent.tiers:
            self._put_in_tier(extent, tier, num_bytes, now_s)
        return True

    # Making room

    def evict(self, store_id: str, tier: Tier, need_bytes: int, now_s: float) -> list[str]:
        """Forget copies in one tier of a store, in the order of its policy, until `need_bytes` are free there. Nothing
        that somebody holds goes.

        Of extents last used together, deeper ones go first: a suffix without its prefix can never be hit.

        Returns:
            Ids of the extents, for the store to free there; none at all when what can go is less than `need_bytes`.
        """
        self.sweep(now_s)
        contents = self._tier(store_id, tier)
        victims = contents.victims(need_bytes, now_s)
        while victims is None and self.sweep(now_s):
            victims = contents.victims(need_bytes, now_s)
        if victims is None:
            self.counters.evictions_refused += 1
            return []
        self._count_copies(tier, "evicted", len(victims))
        return [self._remove_copy(self._by_handle[handle], tier) for handle in victims]

    def expire(self, store_id: str, now_s: float, limit: int) -> dict[Tier, list[str]]:
        """Forget copies of a store that have outlived their time-to-live, at most `limit` in each tier.

        Returns:
            Ids of their extents by tier, for the store to free there. What somebody holds stays for now.
        """
        self.sweep(now_s)
        gone: dict[Tier, list[str]] = {}
        for tier in TIERS:
            handles = self._tier(store_id, tier).expired(now_s, limit)
            gone[tier] = [self._remove_copy(self._by_handle[handle], tier) for handle in handles]
            self._count_copies(tier, "expired", len(handles))
        return gone

    def drop_extent(self, extent_id: str) -> None:
        """Forget a broken extent in all tiers, leased or not: from now on its blocks are a miss. An unknown one is no
        error."""
        if extent_id in self._extents:
            self._remove(self._extents[extent_id])
            self.counters.extents_broken += 1

    def drop_store(self, store_id: str) -> None:
        """Forget all that a lost store held."""
        for extent in [extent for extent in self._extents.values() if extent.info.store_id == store_id]:
            self._remove(extent)
            self.counters.extents_lost += 1

    def set_policy(self, policy: PolicySpec, now_s: float) -> None:
        """Other rules from now on, for what is here too; it counts as used now, in the order in which it was."""
        self._policy = policy
        self._groups = make_policy(policy)[1]
        for extent in sorted(self._extents.values(), key=lambda extent: extent.info.first_block):
            extent.group = self._group_of(extent.info)
        for tiers in self._stores.values():
            for contents in tiers.values():
                contents.replace_policy(make_policy(policy)[0], now_s)

    def sweep(self, now_s: float) -> bool:
        """End some of the leases and puts that have expired. Every method with a `now_s` does this first.

        Returns:
            Whether there was anything to do; False means that none is left that has expired.
        """
        return self._holds.sweep(now_s)

    # What there is

    @property
    def num_blocks(self) -> int:
        """Visible blocks."""
        return len(self._blocks)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended; expired ones count until they are swept."""
        return len(self._holds) - self._holds.num_puts

    @property
    def num_puts(self) -> int:
        """Puts that have not ended; expired ones count until they are swept."""
        return self._holds.num_puts

    def extents_of(self, store_id: str, tier: Tier, now_s: float) -> list[ExtentInfo]:
        """The visible extents in one tier of a store, in the order in which they would go."""
        return [self._by_handle[handle].info for handle in self._tier(store_id, tier).handles(now_s)]

    def bytes_by_store(self) -> dict[str, dict[Tier, int]]:
        """Bytes of the visible extents of each store that has any, by tier."""
        return {
            store_id: {tier: contents.num_bytes for tier, contents in tiers.items() if len(contents)}
            for store_id, tiers in self._stores.items()
            if any(map(len, tiers.values()))
        }

    def _matched(self, keys: Sequence[bytes], start: int) -> int:
        end = start
        while end < len(keys) and keys[end] in self._blocks:
            end += 1
        return end

    def _touch(self, keys: Sequence[bytes], now_s: float) -> None:
        extents: list[_Extent] = []
        for key in keys:
            extent = self._blocks.get(key)
            if extent is not None and (not extents or extent is not extents[-1]):
                extents.append(extent)
        # What was found on a disk may have been listed before the block it inherits its group from.
        group = REST
        for extent in extents:
            group = self._groups.group_of(group, extent.info.keys)
            if group != extent.group:
                extent.group = group
                for tier in extent.tiers:
                    self._stores[extent.info.store_id][tier].regroup(extent.handle, now_s)
        # Last block first: the root of a chain is always more recent than what hangs on it.
        for extent in reversed(extents):
            for tier in extent.tiers:
                self._stores[extent.info.store_id][tier].use(extent.handle, now_s)

    def _tier(self, store_id: str, tier: Tier) -> TierContents:
        tiers = self._stores.setdefault(store_id, {})
        if tier not in tiers:
            tiers[tier] = TierContents(make_policy(self._policy)[0])
        return tiers[tier]

    def _group_of(self, info: ExtentInfo) -> int:
        parent = None if info.parent is None else self._blocks.get(info.parent)
        return self._groups.group_of(REST if parent is None else parent.group, info.keys)

    def _list(self, info: ExtentInfo) -> _Extent:
        """An extent that is in no tier yet; its group is the caller's to find."""
        extent = _Extent(next(self._handles), info)
        self._extents[info.extent_id] = extent
        self._by_handle[extent.handle] = extent
        self._blocks.update(dict.fromkeys(info.keys, extent))
        return extent

    def _put_in_tier(self, extent: _Extent, tier: Tier, num_bytes: int, now_s: float) -> None:
        extent.tiers.add(tier)
        self._tier(extent.info.store_id, tier).add(extent, num_bytes, now_s)

    def _remove_copy(self, extent: _Extent, tier: Tier) -> str:
        """Returns the extent's id."""
        extent.tiers.discard(tier)
        self._stores[extent.info.store_id][tier].remove(extent.handle)
        if not extent.tiers:
            del self._extents[extent.info.extent_id]
            del self._by_handle[extent.handle]
            for key in extent.info.keys:
                del self._blocks[key]
        return extent.info.extent_id

    def _remove(self, extent: _Extent) -> None:
        for tier in list(extent.tiers):
            self._remove_copy(extent, tier)

    def _count_copies(self, tier: Tier, cause: str, number: int) -> None:
        name = f"{tier}_{cause}"
        setattr(self.counters, name, getattr(self.counters, name) + number)

    def _count_expiry(self, hold: Hold) -> None:
        if isinstance(hold, Put):
            self.counters.puts_expired += 1
        else:
            self.counters.leases_expired += 1
