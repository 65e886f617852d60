"""What the directory, the node stores and the workers tell each other about stored blocks. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from kv.part_range import PartRange
from kv.tiers import Tier


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part by the name under which its store knows it; blocks of `range` count from the start of the request."""

    part_id: str
    range: PartRange


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """Consecutive blocks of one chain that are stored, and evicted, together.

    `parts` hold every layer and KV head of these blocks once.
    """

    extent_id: str
    store_id: str
    keys: tuple[bytes, ...]
    parts: tuple[StoredPart, ...]
    num_bytes: int
    """Of the parts as they lie in memory."""
    parent: bytes | None
    """Key of the block before the first one; None for the beginning of a chain."""

    @property
    def first_block(self) -> int:
        """Place of the first block in its chain."""
        return self.parts[0].range.first_block


@dataclass(frozen=True, slots=True)
class Copy:
    """An extent in one tier of its store."""

    info: ExtentInfo
    tier: Tier
    num_bytes: int
    """That it takes there."""


@dataclass(frozen=True, slots=True)
class ExtentSlice:
    """The blocks `first` to `first + count - 1` of an extent (counted within it), with all the extent's parts."""

    extent_id: str
    store_id: str
    first: int
    count: int
    parts: tuple[StoredPart, ...]
    tier: Tier = "dram"
    """The fastest one that has it."""


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
