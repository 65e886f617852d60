"""What the global store has of one request, between the look-up and the fetch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from actors.messages import HandOver
from kv.extents import Lookup, PullReceipt, TailReceipt


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The lease in `lookup` is this worker's until it is fetched or given up."""

    keys: tuple[bytes, ...]
    lookup: Lookup
    tail: TailReceipt | None
    num_tokens: int
    """Tokens whose KV can be fetched."""
    is_handed_over: bool
    """All of it is fetched, however long that takes: a decode worker is not there to compute prompts."""
    is_begun: bool
    """The request has tokens from another worker already: its prompt was counted there."""


def without_leading(lookup: Lookup, first_block: int) -> Lookup:
    """The lookup without slices that lie wholly before `first_block`."""
    slices, stop = [], lookup.first_block
    for piece in lookup.slices:
        stop += piece.count
        if stop > first_block:
            slices.append(piece)
    return replace(lookup, slices=tuple(slices))


def tail_of(hand_over: HandOver | None) -> TailReceipt | None:
    """The tail that goes with a hand-over, if there is one to claim."""
    receipt = None if hand_over is None else hand_over.receipt
    return receipt.tail if isinstance(receipt, PullReceipt) else None
