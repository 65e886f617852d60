"""What the directory, the node stores and the workers tell each other about stored blocks. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kv.part_range import LaneRange, PartRange
from kv.tiers import Tier


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part by the name under which its store knows it; blocks of `range` count from the start of the request."""

    part_id: str
    range: PartRange


def part_id_of(extent_id: str, number: int) -> str:
    """The name of an extent's part; parts of an extent count from 0."""
    return f"{extent_id}/{number}"


def extent_of(part_id: str) -> tuple[str, int]:
    """Extent and number of a part, from its name."""
    extent_id, number = part_id.rsplit("/", 1)
    return extent_id, int(number)


def file_name_of(extent_id: str) -> str:
    """Under which an extent lies in its store's folder: what follows the store's own name."""
    return extent_id.rsplit("/", 1)[1]


def _parts(extent_id: str, first_block: int, num_blocks: int, lanes: tuple[LaneRange, ...]) -> tuple[StoredPart, ...]:
    return tuple(
        StoredPart(part_id_of(extent_id, number), PartRange(first_block, num_blocks, *part))
        for number, part in enumerate(lanes)
    )


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """Consecutive blocks of one chain that are stored, and evicted, together."""

    extent_id: str
    store_id: str
    keys: tuple[bytes, ...]
    first_block: int
    """Place of the first block in its chain."""
    lanes: tuple[LaneRange, ...]
    """Of each part, in their order. Together every layer and KV head once."""
    num_bytes: int
    """Of the parts as they lie in memory."""
    parent: bytes | None
    """Key of the block before the first one; None for the beginning of a chain."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """Each holds all blocks."""
        return _parts(self.extent_id, self.first_block, len(self.keys), self.lanes)


@dataclass(frozen=True, slots=True)
class Copy:
    """An extent in one tier of its store."""

    info: ExtentInfo
    tier: Tier
    num_bytes: int
    """That it takes there."""


@dataclass(frozen=True, slots=True)
class ExtentSlice:
    """The blocks `first` to `first + count - 1` of an extent, counted within it."""

    extent_id: str
    store_id: str
    first: int
    count: int
    first_block: int
    """Of the whole extent; so the next two."""
    num_blocks: int
    lanes: tuple[LaneRange, ...]
    tier: Tier = "dram"
    """The fastest one that has it."""

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        """Of the whole extent."""
        return _parts(self.extent_id, self.first_block, self.num_blocks, self.lanes)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The longest visible prefix. `slices` join up and begin after the skipped blocks.

    `num_blocks` counts from the start of the request, skipped blocks included. `lease_id` is None when `slices` is
    empty.
    """

    lease_id: int | None
    slices: tuple[ExtentSlice, ...]
    num_blocks: int

    @property
    def first_block(self) -> int:
        """Where the slices begin: blocks before it were skipped."""
        return self.num_blocks - sum(piece.count for piece in self.slices)


@dataclass(frozen=True, slots=True)
class PutTicket:
    """What a store may put. `put_id` is None when nothing is missing."""

    put_id: int | None
    missing: tuple[tuple[int, int], ...]
    """Ranges [start, stop) of block indices that are neither visible nor being put."""
    num_pending_blocks: int
    """Blocks that another live put will bring."""


@dataclass(frozen=True, slots=True)
class Room:
    """What came of a demand for room."""

    extent_ids: list[str]
    """For the store to free."""
    num_bytes: int
    """That these took; when there are none, what could have gone all the same."""
    idle_s: float | None
    """Since the last use of what would go next; None when nothing can."""


@dataclass(frozen=True, slots=True)
class HouseRound:
    """What a store is told now and then."""

    directory_id: int
    """Another one after a restart."""
    gone: dict[Tier, list[str]]
    """What has outlived its time-to-live, by tier, for the store to free there."""
    idle_s: dict[Tier, float | None]
    """By tier, since the last use of what would go next; None when nothing can."""


@dataclass(frozen=True, slots=True)
class TailReceipt:
    """Where the KV of a request's partial last block waits. It is handed over once and never indexed."""

    store_id: str
    num_tokens: int
    """Valid tokens in the block."""
    ranges: tuple[PartRange, ...]
    tail_id: str | None
    """For `claim_tail` or `discard_tail` of the store; None when the part is here."""
    inline: bytes | None
    """The one encoded part, when it is small."""


@dataclass(frozen=True, slots=True)
class PullReceipt:
    """What came of a pull."""

    num_stored_blocks: int
    """Blocks that this pull made visible; others of the request may have been visible before."""
    tail: TailReceipt | None
    """None when the last block is full, or when the tail could not be had (then `refusals` says why)."""
    refusals: tuple[str, ...] = ()
    """A metric label for each thing that could not be stored."""
