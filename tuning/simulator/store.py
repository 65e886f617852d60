"""The global store: a DRAM tier, a disk tier under it, and the queues through which bytes get in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kv.policy.policy_file import make_policy
from tuning.simulator.events import STORED, EventQueue
from tuning.simulator.lane import Lane, submit_through
from tuning.simulator.run_table import without
from tuning.simulator.settings import SimulationSettings
from tuning.simulator.tier_blocks import TierBlocks
from tuning.simulator.write_behind import WriteBehind

DRAM: Final = 0
DISK: Final = 1
STAGED: Final = 2
"""Read, or being read, from the disk for this request since it arrived."""


@dataclass(slots=True)
class MovedBytes:
    """Why bytes moved. The sums are what the lanes counted."""

    dram_fetched: int = 0
    """To a prefill; what came from the disk for it goes through DRAM as well."""
    dram_handed_over: int = 0
    """To decode."""
    dram_to_disk: int = 0
    """Written behind: each block that the disk has was demoted while DRAM still had it."""
    disk_fetched: int = 0
    """Read when a prefill began."""
    disk_prefetched: int = 0
    """Read while a request waited."""
    dram_promoted: int = 0
    """Into DRAM, from the disk."""
    dram_stored: int = 0
    """Into DRAM, from instances; tails that are only handed over among it."""


@dataclass(frozen=True, slots=True)
class _Staged:
    """Blocks `start` to `stop` of a prompt were read ahead, and are there at `ready_s`."""

    start: int
    stop: int
    ready_s: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of a prompt, up to `stop`, that lie in one place."""

    stop: int
    place: int


@dataclass(slots=True)
class _Promotions:
    """What is on its way from the disk: stretches `start` to `stop` of prompts, by the number of their transfer."""

    stretches: dict[int, tuple[Sequence[int], list[tuple[int, int]]]] = field(default_factory=dict)
    ready_s: dict[int, float] = field(default_factory=dict)
    """By block."""
    begun: int = 0


class Store:
    """See the module. Blocks are `block_bytes` each in both tiers.

    What is evicted from DRAM is gone from there only: it was written behind to the disk. What outlives its
    time-to-live, or is evicted from the disk, is gone.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        block_bytes: int,
        groups: Sequence[int] | None,
        events: EventQueue,
    ) -> None:
        self.block_bytes = block_bytes
        self.dram = _tier(settings, settings.dram_bytes // block_bytes, groups)
        self.disk = _tier(settings, settings.disk_bytes // block_bytes, groups)
        self.dram_read = Lane(settings.dram_read_bytes_per_s)
        self.dram_write = Lane(settings.dram_write_bytes_per_s)
        self.disk_read = Lane(settings.disk_read_bytes_per_s, settings.disk_iops, settings.disk_operation_bytes)
        self.disk_write = Lane(settings.disk_write_bytes_per_s, settings.disk_iops, settings.disk_operation_bytes)
        self.moved = MovedBytes()
        self._has_dram = self.dram.capacity_blocks != 0
        self._has_disk = self.disk.capacity_blocks != 0
        self._prefetches = settings.prefetch and self._has_disk
        self._has_ttl = any(ttl_s is not None for ttl_s in settings.policy.ttls_s)
        self._expired_s = -1.0
        self._staged: dict[int, _Staged] = {}
        self._promotions = _Promotions()
        self._events = events
        self.write_behind = WriteBehind(settings, self, events)

    @property
    def is_there(self) -> bool:
        """Whether anything can be stored at all."""
        return self._has_dram or self._has_disk

    def expire(self, now_s: float) -> None:
        """Forget what has outlived its time-to-live: to be called before anything is looked for."""
        if self._has_ttl and now_s != self._expired_s:
            self._expired_s = now_s
            self.dram.expire(now_s)
            self.disk.expire(now_s)

    def matched(self, chain: Sequence[int], start: int, stop: int) -> int:
        """Where the blocks `chain[start:stop]` that follow each other in either tier end."""
        end = self.dram.matched(chain, start, stop)
        if self._has_disk:
            while end < stop:
                further = self.disk.matched(chain, end, stop)
                if further == end:
                    break
                end = self.dram.matched(chain, further, stop)
        return end

    def prefetch(self, row: int, chain: Sequence[int], stop: int, now_s: float) -> None:
        """A request has come that finds `chain[:stop]`: begin to read what only the disk has of it."""
        if self._prefetches and stop:
            start = self.dram.matched(chain, 0, stop)
            if start < stop:
                ready_s = self._read_disk(chain, start, stop, now_s, is_prefetch=True)[1]
                self._staged[row] = _Staged(start, stop, ready_s)

    def segments(self, row: int, chain: Sequence[int], start: int, stop: int) -> tuple[list[Segment], float]:
        """Where the blocks of a prompt from `start` on lie, as long as they follow each other; and when what was read
        ahead for it is there."""
        staged = self._staged.pop(row, None)
        first, last, ready_s = (stop, stop, 0.0) if staged is None else (staged.start, staged.stop, staged.ready_s)
        found: list[Segment] = []
        index = start
        while index < stop:
            if first <= index < last:
                end, place = last, STAGED
            else:
                limit = first if index < first else stop
                end, place = self.dram.matched(chain, index, limit), DRAM
                if end == index and self._has_disk:
                    end, place = self.disk.matched(chain, index, limit), DISK
                    # Not beyond what DRAM has of it.
                    end = self.dram.missing(chain, index, end)
                if end == index:
                    break
            found.append(Segment(end, place))
            index = end
        return found, ready_s

    def use(self, chain: Sequence[int], stop: int, now_s: float) -> None:
        """A prompt found `chain[:stop]`."""
        self.dram.use(chain, stop, now_s)
        if self._has_disk:
            self.disk.use(chain, stop, now_s)
            self.write_behind.used(chain, stop, now_s)

    def fetch(
        self,
        chain: Sequence[int],
        start: int,
        segments: Sequence[Segment],
        staged_ready_s: float,
        link: Lane,
        now_s: float,
    ) -> tuple[float, float]:
        """Bring the blocks of `segments`, from `start` on, to an instance.

        Returns:
            When bytes begin to flow, and when the last has come.
        """
        begin_s = end_s = now_s
        first = start
        for segment in segments:
            if segment.place == DISK:
                disk_begin_s, disk_end_s = self._read_disk(chain, first, segment.stop, now_s, is_prefetch=False)
                begin_s, end_s = max(begin_s, disk_begin_s), max(end_s, disk_end_s)
            elif segment.place == STAGED:
                end_s = max(end_s, staged_ready_s)
            first = segment.stop
        num_bytes = (first - start) * self.block_bytes
        self.moved.dram_fetched += num_bytes
        link_begin_s, link_end_s = submit_through(self.dram_read, link, now_s, num_bytes)
        return max(begin_s, link_begin_s), max(end_s, link_end_s)

    def hand_over(self, num_bytes: int, link: Lane, now_s: float) -> float:
        """Bring a computed prompt's KV to its decode instance; when it is there."""
        self.moved.dram_handed_over += num_bytes
        return submit_through(self.dram_read, link, now_s, num_bytes)[1]

    def missing_blocks(self, chain: Sequence[int], stop: int) -> int:
        """How many of `chain[:stop]` would have to be written to be in DRAM, or on disk where there is no DRAM."""
        tier = self.dram if self._has_dram or not self._has_disk else self.disk
        num_missing = start = 0
        while start < stop:
            end = tier.matched(chain, start, stop)
            start = tier.missing(chain, end, stop)
            num_missing += start - end
        return num_missing

    def write(self, num_bytes: int, link: Lane, earliest_s: float) -> float:
        """Bring KV from an instance, from `earliest_s` on; when all of it is there."""
        self.moved.dram_stored += num_bytes
        return submit_through(self.dram_write, link, earliest_s, num_bytes)[1]

    def put(self, chain: Sequence[int], stop: int, num_nameless: int, now_s: float) -> None:
        """What was written can be found: `chain[:stop]`, and blocks that nobody will ask for.

        What has expired of it, and was not looked for since, is used again, as in the live directory.
        """
        if self._has_dram:
            if stop:
                self.dram.put(chain, stop, now_s)
            if num_nameless:
                self.dram.put_nameless(num_nameless, now_s)
        if self._has_disk:
            if stop:
                self.disk.use(chain, stop, now_s)
            self.write_behind.stored(chain, stop, num_nameless, now_s)

    def _read_disk(
        self, chain: Sequence[int], start: int, stop: int, now_s: float, *, is_prefetch: bool
    ) -> tuple[float, float]:
        """Read what of `chain[start:stop]` is not in DRAM nor being read; when that begins, and when all is there."""
        promotions = self._promotions
        stretches, end_s = [], now_s
        while start < stop:
            start = self.dram.matched(chain, start, stop)
            end = self.dram.missing(chain, start, stop)
            for block in promotions.ready_s.keys() & chain[start:end]:
                end_s = max(end_s, promotions.ready_s[block])
            stretches += without(chain, start, end, promotions.ready_s.keys())
            start = end
        num_blocks = sum(last - first for first, last in stretches)
        if not num_blocks:
            return now_s, end_s
        num_bytes = num_blocks * self.block_bytes
        if is_prefetch:
            self.moved.disk_prefetched += num_bytes
        else:
            self.moved.disk_fetched += num_bytes
        begin_s, read_s = self.disk_read.submit(now_s, num_bytes)
        for first, last in stretches:
            promotions.ready_s.update(dict.fromkeys(chain[first:last], read_s))
        promotions.begun += 1
        promotions.stretches[promotions.begun] = chain, stretches
        self._events.schedule(read_s, STORED, self._promote, promotions.begun)
        return begin_s, max(end_s, read_s)

    def _promote(self, now_s: float, number: int) -> None:
        """Blocks have been read from the disk."""
        chain, stretches = self._promotions.stretches.pop(number)
        for first, last in stretches:
            for block in chain[first:last]:
                del self._promotions.ready_s[block]
            if self._has_dram:
                self.moved.dram_promoted += self.dram.put_missing(chain, first, last, now_s) * self.block_bytes


def _tier(settings: SimulationSettings, capacity_blocks: int, groups: Sequence[int] | None) -> TierBlocks:
    return TierBlocks(
        capacity_blocks,
        make_policy(settings.policy),
        group_of_block=groups,
        counts_uses=settings.policy.eviction == "lfu",
        front_first=settings.touch_order == "front_to_back",
    )
