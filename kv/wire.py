"""How keys, lookups and extents travel between the directory's actor and its callers: as bytes.

Ray sends bytes as they are. Anything else goes through a pickler that is extended in Python: it takes longer for the
slices of one lookup than the lookup itself. Both ends are parts of one app, so pickle is safe here.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kv.extents import Copy, ExtentInfo, ExtentSlice, Lookup
from kv.keys import KEY_BYTES

_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class LookupRequest:
    """See `Directory.lookup`."""

    keys: Sequence[bytes]
    lease_s: float
    skip_blocks: int = 0
    released: Sequence[int] = ()
    """Leases that have ended since the last request."""


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Keys of `KEY_BYTES` bytes each."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> tuple[bytes, ...]:
    """What `pack_keys` was given."""
    return struct.unpack(f"{KEY_BYTES}s" * (len(packed) // KEY_BYTES), packed)


def pack_request(request: LookupRequest) -> bytes:
    """One message: each argument of a call costs by itself."""
    packed = (pack_keys(request.keys), request.lease_s, request.skip_blocks, tuple(request.released))
    return pickle.dumps(packed, _PROTOCOL)


def unpack_request(packed: bytes) -> LookupRequest:
    """What `pack_request` was given."""
    keys, lease_s, skip_blocks, released = pickle.loads(packed)
    return LookupRequest(unpack_keys(keys), lease_s, skip_blocks, released)


def pack_lookup(lookup: Lookup) -> bytes:
    """As plain tuples; what slices have in common is sent once."""
    slices = [
        (
            piece.extent_id,
            piece.store_id,
            piece.first,
            piece.count,
            piece.first_block,
            piece.num_blocks,
            piece.lanes,
            piece.tier,
        )
        for piece in lookup.slices
    ]
    return pickle.dumps((lookup.lease_id, slices, lookup.num_blocks), _PROTOCOL)


def unpack_lookup(packed: bytes) -> Lookup:
    """What `pack_lookup` was given."""
    lease_id, slices, num_blocks = pickle.loads(packed)
    return Lookup(lease_id, tuple(ExtentSlice(*piece) for piece in slices), num_blocks)


def pack_extents(infos: Iterable[ExtentInfo]) -> bytes:
    """As plain tuples."""
    return pickle.dumps([_fields_of(info) for info in infos], _PROTOCOL)


def unpack_extents(packed: bytes) -> list[ExtentInfo]:
    """What `pack_extents` was given."""
    return [ExtentInfo(*fields) for fields in pickle.loads(packed)]


def pack_copies(copies: Iterable[Copy]) -> bytes:
    """As plain tuples."""
    return pickle.dumps([(_fields_of(copy.info), copy.tier, copy.num_bytes) for copy in copies], _PROTOCOL)


def unpack_copies(packed: bytes) -> list[Copy]:
    """What `pack_copies` was given."""
    return [Copy(ExtentInfo(*fields), tier, num_bytes) for fields, tier, num_bytes in pickle.loads(packed)]


def _fields_of(info: ExtentInfo) -> tuple[object, ...]:
    return (info.extent_id, info.store_id, info.keys, info.first_block, info.lanes, info.num_bytes, info.parent)
