from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv.errors import PartError
from kv.layout import KvLayout
from kv.part_range import PartRange
from kv.parts import (
    PREFIX_BYTES,
    PartExpectation,
    PartHeader,
    decode_part,
    draft_part,
    encode_part,
    encoded_bytes,
    payload_offset,
    read_header,
)

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_tokens=4, dtype="float32")
KEYS = (b"\1" * 32, b"\2" * 32)
HEADER = PartHeader(LAYOUT, b"model", PartRange(5, 2, 1, 2, 0, 2), KEYS, last_block_tokens=4)
EXPECT = PartExpectation(LAYOUT, b"model", HEADER.range, KEYS)


def random_payload(header: PartHeader, seed: int = 0) -> NDArray[Any]:
    generator = np.random.default_rng(seed)
    shape = header.range.shape(header.layout)
    if header.layout.dtype == "float32":
        return generator.standard_normal(shape).astype(np.float32)
    return generator.integers(-(2**15), 2**15, shape).astype(np.int16)


GOOD = encode_part(HEADER, random_payload(HEADER))


def forged(raw_header: bytes, payload: bytes, *, version: int = 1, header_bytes: int | None = None) -> bytes:
    """A part with a right checksum around any content, written from the format's description."""
    length = len(raw_header) if header_bytes is None else header_bytes
    body = b"EQPZPART" + struct.pack("<II", version, length) + raw_header
    body += b"\0" * (-len(body) % 64) + payload
    return body + xxhash.xxh3_128(body).digest()


def good_header_fields() -> dict[str, Any]:
    return {
        "fingerprint": b"model".hex(),
        "format": 1,
        "keys": [key.hex() for key in KEYS],
        "last_block_tokens": 4,
        "layout": {"block_tokens": 4, "dtype": "float32", "head_dim": 4, "num_kv_heads": 2, "num_layers": 3},
        "range": {
            "first_block": 5,
            "first_head": 0,
            "first_layer": 1,
            "num_blocks": 2,
            "num_heads": 2,
            "num_layers": 2,
        },
    }


def canonical(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def reason_of(buffer: object, expect: PartExpectation = EXPECT) -> str:
    with pytest.raises(PartError) as caught:
        decode_part(buffer, expect)
    assert caught.value.reason in str(caught.value)
    return caught.value.reason


def test_the_format_is_as_described() -> None:
    payload = random_payload(HEADER)
    assert encode_part(HEADER, payload).tobytes() == forged(canonical(good_header_fields()), payload.tobytes())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_encoded_is_decoded(dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    header = replace(HEADER, layout=layout)
    payload = random_payload(header)
    buffer = encode_part(header, payload)
    part = decode_part(buffer, replace(EXPECT, layout=layout))
    assert part.header == header
    np.testing.assert_array_equal(part.payload, payload)
    assert part.payload.dtype == (np.float32 if dtype == "float32" else np.int16)
    assert len(buffer) == encoded_bytes(header)


def test_bytes_and_strided_arrays_are_taken_too() -> None:
    payload = random_payload(HEADER)
    strided = np.asfortranarray(payload)
    assert encode_part(HEADER, strided).tobytes() == GOOD.tobytes()
    assert encode_part(HEADER, payload.view(np.uint8)).tobytes() == GOOD.tobytes()
    assert encode_part(HEADER, payload.reshape(-1).view(np.uint8)).tobytes() == GOOD.tobytes()


def test_a_filled_draft_equals_an_encoded_part() -> None:
    draft = draft_part(HEADER)
    draft.payload[...] = random_payload(HEADER)
    assert draft.seal().tobytes() == GOOD.tobytes()


def test_the_payload_is_an_aligned_read_only_view() -> None:
    part = decode_part(GOOD, EXPECT)
    assert np.shares_memory(part.payload, GOOD)
    start = part.payload.__array_interface__["data"][0] - GOOD.__array_interface__["data"][0]
    assert start % 64 == 0
    assert not part.payload.flags.writeable
    assert GOOD.flags.writeable


@pytest.mark.parametrize("payload", [np.zeros((2, 2, 2, 2, 4, 4), np.int16), np.zeros((2, 2), np.float32)])
def test_a_payload_that_does_not_fit_is_refused(payload: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match="does not fit the header"):
        encode_part(HEADER, payload)


def test_a_tail_has_no_key_and_zeros_after_its_tokens() -> None:
    header = PartHeader(LAYOUT, b"model", PartRange(7, 1, 0, 3, 0, 2), (), last_block_tokens=3)
    payload = random_payload(header)
    expect = PartExpectation(LAYOUT, b"model", header.range, (), last_block_tokens=3)
    buffer = encode_part(header, payload)
    part = decode_part(buffer, expect)
    np.testing.assert_array_equal(part.payload[..., :3, :], payload[..., :3, :])
    assert not part.payload[..., 3:, :].any()
    assert reason_of(buffer, replace(expect, last_block_tokens=2)) == "tokens"
    assert reason_of(buffer, replace(expect, last_block_tokens=None)) == "tokens"


def test_a_reader_may_know_some_of_the_keys() -> None:
    decode_part(GOOD, replace(EXPECT, keys=KEYS[:1]))
    decode_part(GOOD, replace(EXPECT, keys=KEYS[1:], first_key=1))
    assert reason_of(GOOD, replace(EXPECT, keys=KEYS[1:], first_key=0)) == "keys"
    assert reason_of(GOOD, replace(EXPECT, keys=KEYS, first_key=1)) == "keys"


@given(st.integers(0, 8 * GOOD.size - 1))
def test_a_flipped_bit_is_refused(bit: int) -> None:
    damaged = GOOD.copy()
    damaged[bit // 8] ^= 1 << (bit % 8)
    reason_of(damaged)


@given(st.integers(0, GOOD.size - 1), st.booleans())
def test_a_cut_part_is_refused(size: int, cut_front: bool) -> None:
    reason_of(GOOD[-size:] if cut_front and size else GOOD[:size])


@given(st.binary(min_size=1, max_size=100))
def test_an_appendix_is_refused(appendix: bytes) -> None:
    assert reason_of(GOOD.tobytes() + appendix) == "checksum"


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(junk: bytes) -> None:
    reason_of(junk)
    reason_of(b"EQPZPART" + struct.pack("<I", 1) + junk)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=4)))
def test_any_json_header_is_refused(value: object) -> None:
    assert reason_of(forged(canonical(value), b"")) == "header"


HEADER_CHANGES: list[tuple[str, tuple[str, ...], object, str]] = [
    ("foreign fingerprint", ("fingerprint",), b"other".hex(), "fingerprint"),
    ("fingerprint of another type", ("fingerprint",), 7, "header"),
    ("fingerprint no hex", ("fingerprint",), "xy", "header"),
    ("fingerprint in capitals", ("fingerprint",), b"model".hex().upper(), "header"),
    ("format version of the header", ("format",), 2, "header"),
    ("other dtype", ("layout", "dtype"), "float16", "dtype"),
    ("unknown dtype", ("layout", "dtype"), "int4", "header"),
    ("other head_dim", ("layout", "head_dim"), 8, "layout"),
    ("head_dim a float", ("layout", "head_dim"), 4.0, "header"),
    ("num_layers true", ("layout", "num_layers"), True, "header"),
    ("other first block", ("range", "first_block"), 4, "range"),
    ("negative first block", ("range", "first_block"), -1, "header"),
    ("first block a float", ("range", "first_block"), 5.0, "header"),
    ("other first layer", ("range", "first_layer"), 0, "range"),
    ("layers beyond the model", ("range", "num_layers"), 3, "header"),
    ("huge block count", ("range", "num_blocks"), 10**30, "header"),
    ("no heads", ("range", "num_heads"), 0, "header"),
    ("too many valid tokens", ("last_block_tokens",), 5, "header"),
    ("partial block with a key", ("last_block_tokens",), 3, "header"),
    ("other keys", ("keys",), [b"\1".hex() * 32, b"\3".hex() * 32], "keys"),
    ("a key missing", ("keys",), [b"\1".hex() * 32], "header"),
    ("keys no list", ("keys",), None, "header"),
    ("layout no object", ("layout",), [], "header"),
    ("range no object", ("range",), "0", "header"),
    ("unknown field", ("extra",), 1, "header"),
    ("unknown range field", ("range", "extra"), 1, "header"),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"), [c[1:] for c in HEADER_CHANGES], ids=[c[0] for c in HEADER_CHANGES]
)
def test_another_header_is_refused_with_its_reason(path: tuple[str, ...], value: object, reason: str) -> None:
    fields = good_header_fields()
    target = fields
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    assert reason_of(forged(canonical(fields), random_payload(HEADER).tobytes())) == reason


@pytest.mark.parametrize("field", ["fingerprint", "format", "keys", "last_block_tokens", "layout", "range"])
def test_a_missing_header_field_is_refused(field: str) -> None:
    fields = good_header_fields()
    del fields[field]
    assert reason_of(forged(canonical(fields), random_payload(HEADER).tobytes())) == "header"


def test_defects_have_their_reason() -> None:
    raw, payload = canonical(good_header_fields()), random_payload(HEADER).tobytes()
    decode_part(forged(raw, payload), EXPECT)
    assert reason_of(b"") == "truncated"
    assert reason_of(np.empty(0, np.uint8)) == "truncated"
    assert reason_of(GOOD[:20]) == "truncated"
    assert reason_of(b"X" + GOOD.tobytes()[1:]) == "magic"
    assert reason_of(forged(raw, payload, version=2)) == "version"
    assert reason_of(forged(raw, payload, header_bytes=2**32 - 1)) == "truncated"
    assert reason_of(forged(raw, payload[:-4])) == "size"
    assert reason_of(forged(raw, payload + b"\0" * 4)) == "size"
    assert reason_of(forged(raw, b"")) == "size"
    assert reason_of(forged(b" " + raw, payload)) == "header"
    assert reason_of(forged(b"\xff\xfe", payload)) == "header"
    assert reason_of(forged(b"[" * 100_000, payload)) == "header"
    assert reason_of(forged(b"1" * 5_000, payload)) == "header"


@pytest.mark.parametrize(
    "thing",
    [None, 3, "text", ["list"], RuntimeError("lost"), np.array([object()]), GOOD[::2], object()],
    ids=lambda thing: type(thing).__name__,  # the same in every process, which an address is not
)
def test_things_that_are_no_buffer_are_refused(thing: object) -> None:
    assert reason_of(thing) in ("type", "truncated", "magic")


def header_reason(start: bytes, part_bytes: int) -> str:
    with pytest.raises(PartError) as caught:
        read_header(start, part_bytes)
    return caught.value.reason


def test_a_header_is_read_without_the_payload() -> None:
    offset = payload_offset(GOOD[:PREFIX_BYTES].tobytes(), GOOD.size)
    payload = random_payload(HEADER).tobytes()
    assert GOOD[offset : offset + len(payload)].tobytes() == payload
    assert read_header(GOOD[:offset].tobytes(), GOOD.size) == HEADER
    assert read_header(GOOD.tobytes(), GOOD.size) == HEADER


def test_a_header_of_another_part_is_refused() -> None:
    offset = payload_offset(GOOD[:PREFIX_BYTES].tobytes(), GOOD.size)
    start = GOOD[:offset].tobytes()
    assert header_reason(start, GOOD.size - 1) == header_reason(start, GOOD.size + 1) == "size"
    assert header_reason(start, offset + 15) == "truncated"
    assert header_reason(start[:-1], GOOD.size) == header_reason(b"", GOOD.size) == "truncated"
    assert header_reason(b"X" + start[1:], GOOD.size) == "magic"
    assert header_reason(start[:8] + b"\2" + start[9:], GOOD.size) == "version"
    assert header_reason(start.replace(b"{", b" "), GOOD.size) == "header"


@given(st.integers(0, 500), st.binary(max_size=300))
def test_any_start_of_a_part_gives_its_header_or_is_refused(cut: int, junk: bytes) -> None:
    with suppress(PartError):
        assert read_header(GOOD[:cut].tobytes() + junk, GOOD.size) == HEADER
