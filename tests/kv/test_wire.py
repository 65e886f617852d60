from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv.extents import Copy, ExtentInfo, ExtentSlice, Lookup
from kv.keys import KEY_BYTES
from kv.part_range import LaneRange
from kv.tiers import TIERS
from kv.wire import (
    LookupRequest,
    pack_copies,
    pack_extents,
    pack_keys,
    pack_lookup,
    pack_request,
    unpack_copies,
    unpack_extents,
    unpack_keys,
    unpack_lookup,
    unpack_request,
)

keys = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=5).map(tuple)
numbers = st.integers(0, 2**63)
lanes = st.lists(st.builds(LaneRange, numbers, numbers, numbers, numbers), max_size=3).map(tuple)
infos = st.builds(
    ExtentInfo,
    extent_id=st.text(),
    store_id=st.text(),
    keys=keys,
    first_block=numbers,
    lanes=lanes,
    num_bytes=numbers,
    parent=st.none() | st.binary(),
)
slices = st.builds(
    ExtentSlice,
    extent_id=st.text(),
    store_id=st.text(),
    first=numbers,
    count=numbers,
    first_block=numbers,
    num_blocks=numbers,
    lanes=lanes,
    tier=st.sampled_from(TIERS),
)
lookups = st.builds(Lookup, st.none() | numbers, st.lists(slices, max_size=3).map(tuple), numbers)


@given(keys)
def test_keys_come_back(sent: tuple[bytes, ...]) -> None:
    assert unpack_keys(pack_keys(sent)) == sent
    assert len(pack_keys(sent)) == KEY_BYTES * len(sent)


@given(st.builds(LookupRequest, keys, st.floats(0, 1e9), numbers, st.lists(numbers, max_size=3).map(tuple)))
def test_requests_come_back(sent: LookupRequest) -> None:
    assert unpack_request(pack_request(sent)) == sent


@given(lookups)
def test_lookups_come_back(sent: Lookup) -> None:
    assert unpack_lookup(pack_lookup(sent)) == sent


@given(st.lists(infos, max_size=3))
def test_extents_come_back(sent: list[ExtentInfo]) -> None:
    assert unpack_extents(pack_extents(sent)) == sent
    copies = [Copy(info, "disk", number) for number, info in enumerate(sent)]
    assert unpack_copies(pack_copies(copies)) == copies


def test_what_slices_share_is_sent_once() -> None:
    store_id, shared = "s" * 56, tuple(LaneRange(layer, 1, 0, 8) for layer in range(16))
    pieces = [ExtentSlice(f"{n:032x}", store_id, 0, 20, 20 * n, 20, shared) for n in range(12)]
    one = len(pack_lookup(Lookup(1, tuple(pieces[:1]), 20)))
    all_of_them = len(pack_lookup(Lookup(1, tuple(pieces), 240)))
    assert all_of_them - one < 11 * 80
