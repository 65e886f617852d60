from __future__ import annotations

import math
import struct

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from migrate.links.header import MAX_HEADER_BYTES, FrameType, Header, TensorShape, unpack
from migrate.links.interface import DTYPES, INT32_MAX, INT64_MAX, LinkError

_LIMIT = 1 << 40
# The format by hand: int64 [2, 3] and bfloat16 [], codes 4 and 7; 10 bytes of meta.
_FIELDS = struct.pack("<BxxxiqqqIIQ", 0, 5, 3, 6, 7, 2, 2 + 16 + 2, 10)
_SHAPES = bytes([4, 2]) + struct.pack("<qq", 2, 3) + bytes([7, 0])
_HEADER = Header(FrameType.MESSAGE, 3, 5, 6, 7, 10, (TensorShape(torch.int64, (2, 3)), TensorShape(torch.bfloat16, ())))


def _sealed(checked: bytes, version: int = 1) -> bytes:
    return b"eqlink" + struct.pack("<HQ", version, xxhash.xxh3_64_intdigest(checked)) + checked


def _fields(
    frame_type: int = 0, kind: int = 0, epoch: int = 3, tensors: int = 0, shapes_bytes: int = 0, meta_bytes: int = 0
) -> bytes:
    return struct.pack("<BxxxiqqqIIQ", frame_type, kind, epoch, 0, 0, tensors, shapes_bytes, meta_bytes)


def _tensor(code: int, *shape: int) -> bytes:
    return bytes([code, len(shape)]) + struct.pack(f"<{len(shape)}q", *shape)


def test_the_format_is_what_it_was() -> None:
    assert _HEADER.pack() == _sealed(_FIELDS + _SHAPES)
    assert unpack(memoryview(_sealed(_FIELDS + _SHAPES) + b"whatever"), 3, _LIMIT) == _HEADER
    assert _HEADER.num_bytes == len(_HEADER.pack())


def test_codes_of_dtypes_are_what_they_were() -> None:
    names = " ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    assert names == "uint8 int8 int16 int32 int64 bool float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2"


shapes = st.builds(
    TensorShape,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 40), max_size=8).map(tuple).filter(lambda shape: math.prod(shape) < 1 << 20),
)
headers = st.builds(
    Header,
    st.sampled_from(FrameType),
    st.integers(0, INT64_MAX),
    st.integers(0, INT32_MAX),
    st.integers(0, INT64_MAX),
    st.integers(0, INT64_MAX),
    st.integers(0, 1 << 30),
    st.lists(shapes, max_size=12).map(tuple),
)


@settings(deadline=None, max_examples=50)
@given(headers, st.binary(max_size=20))
def test_a_header_comes_back(header: Header, rest: bytes) -> None:
    packed = header.pack()
    assert len(packed) == header.num_bytes <= MAX_HEADER_BYTES
    assert unpack(memoryview(packed + rest), header.epoch, _LIMIT) == header


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    packed = bytearray(data.draw(headers).pack())
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    # Where the changed byte is the claimed length, what follows decides: give it enough of anything.
    epoch = int.from_bytes(packed[24:32], "little", signed=True)
    with pytest.raises(LinkError):
        unpack(memoryview(packed + data.draw(st.binary(max_size=64))), epoch, _LIMIT)


@settings(deadline=None, max_examples=50)
@given(headers, st.data())
def test_a_header_that_is_cut_off_is_refused(header: Header, data: st.DataObject) -> None:
    packed = header.pack()
    with pytest.raises(LinkError):
        unpack(memoryview(packed[: data.draw(st.integers(0, len(packed) - 1))]), header.epoch, _LIMIT)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(LinkError):
        unpack(memoryview(garbage), 3, _LIMIT)


@settings(deadline=None, max_examples=50)
@given(
    tensors=st.integers(0, 2**32 - 1) | st.integers(0, 3),
    shapes=st.binary(max_size=60),
    meta_bytes=st.integers(0, 2**64 - 1) | st.integers(0, 100),
    frame_type=st.integers(0, 255) | st.integers(0, 3),
)
def test_what_a_peer_makes_up_is_refused_or_within_the_limit(
    tensors: int, shapes: bytes, meta_bytes: int, frame_type: int
) -> None:
    fields = _fields(frame_type, tensors=tensors, shapes_bytes=len(shapes), meta_bytes=meta_bytes)
    try:
        header = unpack(memoryview(_sealed(fields + shapes)), 3, 10_000)
    except LinkError:
        return
    assert header.pack() == _sealed(fields + shapes)
    allocated = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in header.tensors]
    assert header.meta_bytes + sum(tensor.nbytes for tensor in allocated) <= 10_000


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(64), "no header of a link"),
        (bytes(10), "10 bytes; a header takes at least 64"),
        (_sealed(_fields(), version=2), "writes format 2 of links, this worker 1: run the same release"),
        (_sealed(_fields(epoch=2)), "epoch 2 came over a link of epoch 3"),
        (_sealed(_fields(frame_type=4)), "type 4; known are 0, 1, 2, 3"),
        (_sealed(_fields(kind=-1)), "kind -1"),
        (_sealed(_fields(meta_bytes=1001)), "announces 1001 bytes; allowed are 1000"),
        (_sealed(_fields(tensors=1, shapes_bytes=18) + _tensor(4, 126, 1)), "announces 1008 bytes"),
        (
            _sealed(_fields(tensors=1, shapes_bytes=18) + _tensor(0, 2**30, 2**30)),
            "announces 1152921504606846976 bytes",
        ),
        (_sealed(_fields(tensors=1, shapes_bytes=18) + _tensor(0, 2**62, 0)), r"shape \[4611686018427387904, 0\]"),
        (_sealed(_fields(tensors=1, shapes_bytes=10) + _tensor(0, -1)), r"shape \[-1\]"),
        (_sealed(_fields(tensors=1, shapes_bytes=2) + _tensor(12)), "dtype 12 of 12"),
        (_sealed(_fields(tensors=1, shapes_bytes=74) + _tensor(0, *[1] * 9)), "9 dimensions"),
        (_sealed(_fields(tensors=2, shapes_bytes=10) + _tensor(0, 1)), "ends before tensor 1 of 2"),
        (_sealed(_fields(tensors=1, shapes_bytes=12) + _tensor(0, 1) + b"xx"), "2 bytes after its last tensor"),
        (_sealed(_fields(tensors=257, shapes_bytes=514) + _tensor(0) * 257), "257 tensors; allowed are 256"),
        (_sealed(_fields(tensors=1, shapes_bytes=2**32 - 1) + _tensor(0)), "claims 4294967359 bytes"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_refusals_say_what_is_wrong(frame: bytes, complaint: str) -> None:
    with pytest.raises(LinkError, match=complaint):
        unpack(memoryview(frame), 3, 1000)
