"""The directory: which KV blocks exist, in which store, and who holds them. Metadata only; time comes in as `now_s`.

    begin_put -> (commit_put | abort_put | expiry)      a block is visible only after the commit of its extent
    lookup    -> renew* -> (release | expiry)           an extent with a hold on it is never evicted
    visible   -> (evict | drop_extent | drop_store)     and then it is a miss

A put holds the visible extents of its chain just as a lease does, so that making room for a suffix never throws out its
own prefix. The two-step put, the lease taken by the lookup itself and the expiry of both follow Mooncake Store.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kv.extents import ExtentInfo, ExtentSlice, Lookup, PutTicket

_SWEEP_LIMIT = 256
"""Holds looked at in one sweep, so that many that expire together do not stall one call."""


@dataclass(slots=True)
class DirectoryCounters:
    """Counts since the start."""

    queries: int = 0
    queried_blocks: int = 0
    hit_blocks: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    puts_committed: int = 0
    puts_aborted: int = 0
    puts_expired: int = 0
    puts_refused: int = 0
    """Commits that came too late or did not fit their put."""
    extents_evicted: int = 0
    extents_broken: int = 0
    """Dropped because a part was damaged or gone."""
    extents_lost: int = 0
    """Dropped with their store."""
    evictions_refused: int = 0
    """Demands for room that could not be met because too much is held."""


@dataclass(slots=True)
class _Extent:
    info: ExtentInfo
    holds: int = 0


@dataclass(slots=True)
class _Hold:
    expires_s: float
    extents: tuple[_Extent, ...]


@dataclass(slots=True)
class _Put(_Hold):
    chain: tuple[bytes, ...]
    missing: frozenset[bytes]


@dataclass(slots=True)
class _Store:
    extents: OrderedDict[str, _Extent] = field(default_factory=OrderedDict)
    """Least recently used first."""
    num_bytes: int = 0


class Directory:
    """See the module. Not thread-safe.

    Args:
        first_id: leases and puts are numbered from here. A directory that replaces a lost one starts elsewhere, so that
            ids given out by the lost one mean nothing to it.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.counters = DirectoryCounters()
        self._ids = itertools.count(first_id)
        self._extents: dict[str, _Extent] = {}
        self._blocks: dict[bytes, tuple[_Extent, int]] = {}
        self._stores: dict[str, _Store] = {}
        self._holds: dict[int, _Hold] = {}
        self._pending: dict[bytes, int] = {}
        self._deadlines: list[tuple[float, int]] = []

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
        for _, group in itertools.groupby(
            (self._blocks[key] for key in keys[skip_blocks:num_blocks]), key=lambda found: found[0].info.extent_id
        ):
            found = list(group)
            extent, first = found[0]
            info = extent.info
            extents.append(extent)
            slices.append(ExtentSlice(info.extent_id, info.store_id, first, len(found), info.parts))

        self.counters.queries += 1
        self.counters.queried_blocks += len(keys) - skip_blocks
        self.counters.hit_blocks += num_blocks - skip_blocks
        self._touch(keys[:num_blocks])
        if not slices:
            return Lookup(None, (), num_blocks)
        self.counters.leases_granted += 1
        lease_id = self._add_hold(_Hold(now_s + lease_s, tuple(extents)))
        return Lookup(lease_id, tuple(slices), num_blocks)

    def renew(self, lease_ids: Iterable[int], now_s: float, lease_s: float) -> list[int]:
        """Let leases end `lease_s` from now.

        Returns:
            Those that were renewed. The others had ended already, and what they held may be gone.
        """
        renewed = []
        for lease_id in lease_ids:
            hold = self._holds.get(lease_id)
            if hold is not None and not isinstance(hold, _Put) and now_s < hold.expires_s:
                hold.expires_s = now_s + lease_s
                renewed.append(lease_id)
        self.sweep(now_s)
        return renewed

    def release(self, lease_id: int) -> None:
        """End a lease. One that has ended already is no error."""
        if lease_id in self._holds and not isinstance(self._holds[lease_id], _Put):
            self._end_hold(lease_id)

    # Writing

    def begin_put(self, keys: Sequence[bytes], now_s: float, ttl_s: float) -> PutTicket:
        """Announce the blocks of a chain. Those of them that nobody has or brings are the caller's to put.

        Args:
            keys: the chain of the request, from its first block.
            ttl_s: a put that is not committed within this time is forgotten.
        """
        self.sweep(now_s)
        self._touch(keys)
        pending = sum(key in self._pending for key in keys)
        missing: list[tuple[int, int]] = []
        index = 0
        for known, group in itertools.groupby(keys, key=lambda key: key in self._blocks or key in self._pending):
            stop = index + sum(1 for _ in group)
            if not known:
                missing.append((index, stop))
            index = stop
        if not missing:
            return PutTicket(None, (), pending)

        missing_keys = frozenset(key for start, stop in missing for key in keys[start:stop])
        visible = {id(self._blocks[key][0]): self._blocks[key][0] for key in keys if key in self._blocks}
        put_id = self._add_hold(_Put(now_s + ttl_s, tuple(visible.values()), tuple(keys), missing_keys))
        self._pending.update(dict.fromkeys(missing_keys, put_id))
        return PutTicket(put_id, tuple(missing), pending)

    def commit_put(self, put_id: int, extents: Sequence[ExtentInfo], now_s: float) -> bool:
        """Make extents visible and end the put. Announced blocks that are in none of them are free to be put again.

        Returns:
            False when nothing was made visible, because the put has expired or the extents do not belong to it.
            The caller keeps, and frees, what it stored.
        """
        put = self._holds.get(put_id)
        if not isinstance(put, _Put):
            self.counters.puts_refused += 1
            return False
        keys = [key for info in extents for key in info.keys]
        in_time = now_s < put.expires_s
        fits = len(set(keys)) == len(keys) and put.missing.issuperset(keys)
        fresh = len({info.extent_id for info in extents} - self._extents.keys()) == len(extents)
        self._end_hold(put_id)
        if not (in_time and fits and fresh):
            self.counters.puts_refused += 1
            return False

        for info in extents:
            extent = _Extent(info)
            self._extents[info.extent_id] = extent
            store = self._stores.setdefault(info.store_id, _Store())
            store.extents[info.extent_id] = extent
            store.num_bytes += info.num_bytes
            self._blocks.update((key, (extent, index)) for index, key in enumerate(info.keys))
        self._touch(put.chain)
        self.counters.puts_committed += 1
        return True

    def abort_put(self, put_id: int) -> None:
        """End a put without making anything visible. One that has ended already is no error."""
        if isinstance(self._holds.get(put_id), _Put):
            self._end_hold(put_id)
            self.counters.puts_aborted += 1

    def has_pending(self, keys: Iterable[bytes]) -> bool:
        """Whether a live put will bring any of these blocks."""
        return any(key in self._pending for key in keys)

    # Making room

    def evict(self, store_id: str, need_bytes: int, now_s: float) -> list[str]:
        """Forget the least recently used extents of a store that nobody holds, until `need_bytes` are free.

        Of extents last used together, deeper ones go first: a suffix without its prefix can never be hit.

        Returns:
            Their ids, for the store to free; none at all when what can go is less than `need_bytes`.
        """
        self.sweep(now_s)
        victims = self._victims(store_id, need_bytes)
        while victims is None and self.sweep(now_s):
            victims = self._victims(store_id, need_bytes)
        if victims is None:
            self.counters.evictions_refused += 1
            return []
        for extent_id in victims:
            self._remove(self._extents[extent_id])
        self.counters.extents_evicted += len(victims)
        return victims

    def drop_extent(self, extent_id: str) -> None:
        """Forget a broken extent, leased or not: from now on its blocks are a miss. An unknown one is no error."""
        if extent_id in self._extents:
            self._remove(self._extents[extent_id])
            self.counters.extents_broken += 1

    def drop_store(self, store_id: str) -> None:
        """Forget all that a lost store held."""
        for extent in list(self._stores[store_id].extents.values()) if store_id in self._stores else ():
            self._remove(extent)
            self.counters.extents_lost += 1

    def sweep(self, now_s: float) -> bool:
        """End some of the leases and puts that have expired. Every method with a `now_s` does this first.

        Returns:
            Whether there was anything to do; False means that none is left that has expired.
        """
        for looked_at in range(_SWEEP_LIMIT):
            if not self._deadlines or self._deadlines[0][0] > now_s:
                return looked_at > 0
            hold_id = heapq.heappop(self._deadlines)[1]
            hold = self._holds.get(hold_id)
            if hold is None:
                continue
            if hold.expires_s > now_s:
                heapq.heappush(self._deadlines, (hold.expires_s, hold_id))
                continue
            self._end_hold(hold_id)
            if isinstance(hold, _Put):
                self.counters.puts_expired += 1
            else:
                self.counters.leases_expired += 1
        return True

    # What there is

    @property
    def num_blocks(self) -> int:
        """Visible blocks."""
        return len(self._blocks)

    @property
    def num_leases(self) -> int:
        """Leases that have not ended; expired ones count until they are swept."""
        return len(self._holds) - self.num_puts

    @property
    def num_puts(self) -> int:
        """Puts that have not ended; expired ones count until they are swept."""
        return sum(isinstance(hold, _Put) for hold in self._holds.values())

    def extents_of(self, store_id: str) -> list[ExtentInfo]:
        """The visible extents of a store, least recently used first."""
        return [extent.info for extent in self._stores[store_id].extents.values()] if store_id in self._stores else []

    def bytes_by_store(self) -> dict[str, int]:
        """Bytes of the visible extents of each store that has any."""
        return {store_id: store.num_bytes for store_id, store in self._stores.items()}

    def _matched(self, keys: Sequence[bytes], start: int) -> int:
        end = start
        while end < len(keys) and keys[end] in self._blocks:
            end += 1
        return end

    def _touch(self, keys: Sequence[bytes]) -> None:
        # Last block first: the root of a chain is always more recent than what hangs on it.
        last: _Extent | None = None
        for key in reversed(keys):
            found = self._blocks.get(key)
            if found is not None and found[0] is not last:
                last = found[0]
                self._stores[last.info.store_id].extents.move_to_end(last.info.extent_id)

    def _victims(self, store_id: str, need_bytes: int) -> list[str] | None:
        victims: list[str] = []
        freed = 0
        store = self._stores.get(store_id, _Store())
        for extent_id, extent in store.extents.items():
            if freed >= need_bytes:
                break
            if extent.holds == 0:
                victims.append(extent_id)
                freed += extent.info.num_bytes
        return victims if freed >= need_bytes else None

    def _remove(self, extent: _Extent) -> None:
        info = extent.info
        del self._extents[info.extent_id]
        for key in info.keys:
            del self._blocks[key]
        store = self._stores[info.store_id]
        del store.extents[info.extent_id]
        store.num_bytes -= info.num_bytes
        if not store.extents:
            del self._stores[info.store_id]

    def _add_hold(self, hold: _Hold) -> int:
        hold_id = next(self._ids)
        self._holds[hold_id] = hold
        heapq.heappush(self._deadlines, (hold.expires_s, hold_id))
        for extent in hold.extents:
            extent.holds += 1
        return hold_id

    def _end_hold(self, hold_id: int) -> None:
        hold = self._holds.pop(hold_id)
        for extent in hold.extents:
            extent.holds -= 1
        if isinstance(hold, _Put):
            for key in hold.missing:
                del self._pending[key]
