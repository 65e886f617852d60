"""The directory: the protocol by which KV blocks become visible, are held and go. Metadata only; time comes in as
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

from kv.block_index import BlockIndex, StoredExtent
from kv.directory_counters import DirectoryCounters
from kv.extents import Copy, ExtentInfo, Lookup, PutTicket, Room
from kv.holds import Hold, HoldTable, Put
from kv.policy.policy_file import PolicySpec
from kv.tiers import TIERS, Tier


class Directory:
    """See the module. Not thread-safe.

    Args:
        first_id: leases and puts are numbered from here. A directory that replaces a lost one starts elsewhere, so that
            ids given out by the lost one mean nothing to it.
        policy: how long what is stored stays, and what goes first; in each tier of each store by itself.
    """

    def __init__(self, first_id: int = 1, policy: PolicySpec | None = None) -> None:
        self.counters = DirectoryCounters()
        self._index = BlockIndex(PolicySpec() if policy is None else policy)
        self._holds = HoldTable(first_id, self._count_expiry)

    # Reading

    def match_blocks(self, keys: Sequence[bytes]) -> int:
        """Length in blocks of the longest visible prefix. Takes no lease and changes nothing."""
        return self._index.prefix(keys)[1]

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
        runs, num_blocks = self._index.prefix(keys, skip_blocks)
        self.counters.queries += 1
        self.counters.queried_blocks += len(keys) - skip_blocks
        self.counters.hit_blocks += num_blocks - skip_blocks
        self.counters.hit_blocks_disk += sum(run.count for run in runs if run.extent.tiers[0] == "disk")
        used = runs if skip_blocks == 0 else list(self._index.runs(keys[:num_blocks]))
        self._index.touch(used, now_s)
        if not runs:
            return Lookup(None, (), num_blocks)
        self.counters.leases_granted += 1
        lease = Hold(now_s + lease_s, tuple(run.extent for run in runs))
        return Lookup(self._holds.add(lease), tuple(run.slice for run in runs), num_blocks)

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
        visible = list(self._index.runs(keys))
        self._index.touch(visible, now_s)
        missing: list[tuple[int, int]] = []
        num_pending = index = 0
        for stop, after in [(run.at_block, run.at_block + run.count) for run in visible] + [(len(keys), len(keys))]:
            for is_pending, group in itertools.groupby(keys[index:stop], key=self._holds.is_pending):
                start, index = index, index + sum(1 for _ in group)
                if is_pending:
                    num_pending += index - start
                else:
                    missing.append((start, index))
            index = after
        if not missing:
            return PutTicket(None, (), num_pending)

        missing_keys = frozenset(key for start, stop in missing for key in keys[start:stop])
        put = Put(now_s + ttl_s, tuple(run.extent for run in visible), tuple(keys), missing_keys)
        return PutTicket(self._holds.add(put), tuple(missing), num_pending)

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
        fresh = len({info.extent_id for info in extents if self._index.extent(info.extent_id) is None}) == len(extents)
        self._holds.end(put_id)
        if not (in_time and fits and fresh):
            self.counters.puts_refused += 1
            return False
        added = [self._index.add(info) for info in extents]
        self._index.inherit_groups(added)
        for extent in added:
            self._index.add_copy(extent, "dram", extent.num_bytes, now_s)
        self._index.touch(list(self._index.runs(put.chain)), now_s)
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
        added: list[tuple[StoredExtent, Copy]] = []
        for copy in copies:
            info = copy.info
            if self.add_copy(info.extent_id, copy.tier, copy.num_bytes, now_s):
                continue
            if self._holds.any_pending(info.keys) or any(key in self._index for key in info.keys):
                refused.append(info.extent_id)
            else:
                added.append((self._index.add(info), copy))
        self._index.inherit_groups(extent for extent, _ in added)
        for extent, copy in added:
            self._index.add_copy(extent, copy.tier, copy.num_bytes, now_s)
        self.counters.extents_adopted += len(added)
        self.counters.adoptions_refused += len(refused)
        return refused

    def add_copy(self, extent_id: str, tier: Tier, num_bytes: int, now_s: float) -> bool:
        """An extent is in another tier of its store too. False when it is not listed (any more): the copy is to be
        freed."""
        extent = self._index.extent(extent_id)
        if extent is None:
            return False
        if tier not in extent.tiers:
            self._index.add_copy(extent, tier, num_bytes, now_s)
        return True

    # Making room

    def evict(self, store_id: str, tier: Tier, need_bytes: int, now_s: float) -> Room:
        """Forget copies in one tier of a store, in the order of its policy, until `need_bytes` are free there; none at
        all when what can go is less. Nothing that somebody holds goes.

        Of extents last used together, deeper ones go first: a suffix without its prefix can never be hit.
        """
        return self._make_room(store_id, tier, need_bytes, now_s, self.counters.evicted)

    def shrink(self, store_id: str, tier: Tier, excess_bytes: int, now_s: float) -> Room:
        """As `evict`; but when what can go is less than `excess_bytes`, all of that goes."""
        room = self._make_room(store_id, tier, excess_bytes, now_s, self.counters.trimmed)
        if room.extent_ids or not room.num_bytes:
            return room
        return self._make_room(store_id, tier, room.num_bytes, now_s, self.counters.trimmed)

    def idle_s(self, store_id: str, tier: Tier, now_s: float) -> float | None:
        """Since the last use of what would go next from a tier of a store; None when nothing can."""
        victim = self._index.next_victim(store_id, tier, now_s)
        return None if victim is None else now_s - victim.used_s

    def expire(self, store_id: str, now_s: float, limit: int) -> dict[Tier, list[str]]:
        """Forget copies of a store that have outlived their time-to-live, at most `limit` in each tier.

        Returns:
            Ids of their extents by tier, for the store to free there. What somebody holds stays for now.
        """
        self.sweep(now_s)
        gone: dict[Tier, list[str]] = {}
        for tier in TIERS:
            overdue = self._index.expired(store_id, tier, now_s, limit)
            gone[tier] = self._remove_copies(overdue, tier)
            self.counters.expired[tier] += len(overdue)
        return gone

    def drop_extent(self, extent_id: str) -> None:
        """Forget a broken extent in all tiers, leased or not: from now on its blocks are a miss. An unknown one is no
        error."""
        extent = self._index.extent(extent_id)
        if extent is not None:
            self._index.remove(extent)
            self.counters.extents_broken += 1

    def drop_store(self, store_id: str) -> None:
        """Forget all that a lost store held."""
        for extent in self._index.extents_of(store_id):
            for tier in extent.tiers:
                self.counters.lost[tier] += 1
            self._index.remove(extent)

    def set_policy(self, policy: PolicySpec, now_s: float) -> None:
        """Other rules from now on, for what is here too; it counts as used now, in the order in which it was."""
        self._index.set_policy(policy, now_s)

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
        return self._index.num_blocks

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
        return [extent.info for extent in self._index.in_order(store_id, tier, now_s)]

    def bytes_by_store(self) -> dict[str, dict[Tier, int]]:
        """Bytes of the visible extents of each store that has any, by tier."""
        return self._index.bytes_by_store()

    def _make_room(self, store_id: str, tier: Tier, need_bytes: int, now_s: float, gone: dict[Tier, int]) -> Room:
        """`gone` counts the copies."""
        self.sweep(now_s)
        victims = self._index.victims(store_id, tier, need_bytes, now_s)
        while victims is None and self.sweep(now_s):
            victims = self._index.victims(store_id, tier, need_bytes, now_s)
        if victims is None:
            self.counters.evictions_refused += 1
            return Room([], self._index.free_bytes(store_id, tier), self.idle_s(store_id, tier, now_s))
        gone[tier] += len(victims)
        used_bytes = self._index.num_bytes(store_id, tier)
        extent_ids = self._remove_copies(victims, tier)
        freed_bytes = used_bytes - self._index.num_bytes(store_id, tier)
        return Room(extent_ids, freed_bytes, self.idle_s(store_id, tier, now_s))

    def _remove_copies(self, extents: Iterable[StoredExtent], tier: Tier) -> list[str]:
        """Returns their ids."""
        extent_ids = []
        for extent in extents:
            self._index.remove_copy(extent, tier)
            extent_ids.append(extent.extent_id)
        return extent_ids

    def _count_expiry(self, hold: Hold) -> None:
        if isinstance(hold, Put):
            self.counters.puts_expired += 1
        else:
            self.counters.leases_expired += 1
