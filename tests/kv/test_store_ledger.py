from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv.extents import ExtentInfo
from kv.part_range import LaneRange
from kv.store_ledger import StoreLedger

LIMIT_BYTES = 100


def extent(extent_id: str, num_bytes: int) -> ExtentInfo:
    lanes = tuple(LaneRange(layer, 1, 0, 1) for layer in range(2))
    return ExtentInfo(extent_id, "s", (extent_id.encode(),), 0, lanes, num_bytes, None)


class LedgerMachine(RuleBasedStateMachine):
    """Against plain dicts of what is reserved and held."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = StoreLedger(LIMIT_BYTES)
        self.reserved: list[int] = []
        self.extents: dict[str, int] = {}
        self.published: set[str] = set()
        self.tails: dict[str, int] = {}
        self.names = 0

    def used(self) -> int:
        return sum(self.reserved) + sum(self.extents.values()) + sum(self.tails.values())

    @rule(num_bytes=st.integers(0, 60))
    def reserve(self, num_bytes: int) -> None:
        fits = self.used() + num_bytes <= LIMIT_BYTES
        assert (self.ledger.shortage(num_bytes) <= 0) == fits
        assert self.ledger.shortage(num_bytes) == self.used() + num_bytes - LIMIT_BYTES
        assert self.ledger.reserve(num_bytes) == fits
        if fits:
            self.reserved.append(num_bytes)

    @rule()
    def give_back(self) -> None:
        if self.reserved:
            self.ledger.give_back(self.reserved.pop())

    @rule()
    def add_extent(self) -> None:
        if self.reserved:
            self.names += 1
            info = extent(f"e{self.names}", self.reserved.pop())
            self.ledger.add_extent(info, [f"ref {part.part_id}" for part in info.parts])
            self.extents[info.extent_id] = info.num_bytes

    @rule(number=st.integers(0, 9))
    def publish(self, number: int) -> None:
        self.ledger.publish(f"e{number}")
        self.published |= {f"e{number}"} & self.extents.keys()

    @rule(number=st.integers(0, 9))
    def remove_extent(self, number: int) -> None:
        self.ledger.remove_extent(f"e{number}")
        self.extents.pop(f"e{number}", None)
        self.published.discard(f"e{number}")

    @rule()
    def add_tail(self) -> None:
        if self.reserved:
            self.names += 1
            self.tails[f"t{self.names}"] = self.reserved.pop()
            self.ledger.add_tail(f"t{self.names}", (f"ref t{self.names}",), self.tails[f"t{self.names}"])

    @rule(number=st.integers(0, 9))
    def remove_tail(self, number: int) -> None:
        refs = self.ledger.remove_tail(f"t{number}")
        assert refs == ((f"ref t{number}",) if f"t{number}" in self.tails else None)
        self.tails.pop(f"t{number}", None)

    @invariant()
    def books_are_right(self) -> None:
        assert self.ledger.used_bytes == self.used() <= LIMIT_BYTES
        assert (self.ledger.num_extents, self.ledger.num_tails) == (len(self.extents), len(self.tails))
        assert set(self.ledger.published()) == self.published
        for number in range(10):
            held = f"e{number}" in self.extents
            assert self.ledger.part(f"e{number}/1") == (f"ref e{number}/1" if held else None)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit_bytes=-1 is not allowed"):
        StoreLedger(-1)
