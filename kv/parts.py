"""The format of a part, the unit in which KV is stored and handed over.

A part is an extent of consecutive blocks x a range of layers x a range of KV heads, in one contiguous buffer:

    offset  size
    0       8      magic
    8       4      format version, unsigned little endian
    12      4      length of the header in bytes, unsigned little endian
    16      n      header: canonical JSON (sorted keys, no spaces, ASCII)
    16+n    0..63  zeros, so that the payload begins at a multiple of 64
    ...     ...    payload: [blocks, layers, heads, 2 (K, V), block_tokens, head_dim], C order, little endian
    end-16  16     xxh3_128 over everything before

Nothing in it is pickled or evaluated. A reader says what it expects; whatever differs is a `PartError`.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, astuple, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kv.errors import PartError
from kv.layout import KvLayout
from kv.part_range import PartRange

FORMAT_VERSION = 1

_MAGIC = b"EQPZPART"
_PREFIX = struct.Struct("<8sII")
PREFIX_BYTES = _PREFIX.size
"""Magic, version and length of the header: what `payload_offset` needs."""

_ALIGNMENT = 64
_DIGEST_BYTES = 16
_RAW_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<i2"),
    "float16": np.dtype("<i2"),
}


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a part says of itself.

    `range.first_block` counts from the start of the request, which for full blocks is their place in the key chain.

    Raises:
        ValueError: the range lies outside the layout, `last_block_tokens` is not in 1..block_tokens, or the number of
            keys is not the number of full blocks.
    """

    layout: KvLayout
    fingerprint: bytes
    """Identifies weights, dtype and layout of the model."""
    range: PartRange
    keys: tuple[bytes, ...]
    """One key per full block: a last block with fewer than `block_tokens` valid tokens has none."""
    last_block_tokens: int
    """Valid tokens in the last block; slots after them are zeros."""

    def __post_init__(self) -> None:
        part = self.range
        if any(type(value) is not int for value in (*astuple(part), self.last_block_tokens)):
            raise ValueError(f"range {part} and last_block_tokens={self.last_block_tokens!r} must be made of ints")
        if not (
            part.first_block >= 0
            and part.num_blocks >= 1
            and 0 <= part.first_layer < part.first_layer + part.num_layers <= self.layout.num_layers
            and 0 <= part.first_head < part.first_head + part.num_heads <= self.layout.num_kv_heads
        ):
            raise ValueError(f"range {part} does not lie within {self.layout}")
        if not 1 <= self.last_block_tokens <= self.layout.block_tokens:
            raise ValueError(
                f"last_block_tokens={self.last_block_tokens} is not allowed: give 1 to {self.layout.block_tokens}"
            )
        full_blocks = part.num_blocks - (self.last_block_tokens < self.layout.block_tokens)
        if len(self.keys) != full_blocks:
            raise ValueError(f"{len(self.keys)} keys were given for {full_blocks} full blocks: give one for each")

    def expectation(self) -> PartExpectation:
        """That a part says all that this header says."""
        return PartExpectation(
            self.layout, self.fingerprint, self.range, self.keys, last_block_tokens=self.last_block_tokens
        )


@dataclass(frozen=True, slots=True)
class PartExpectation:
    """What a reader wants a part to be. It may know the keys of some of the part's blocks only."""

    layout: KvLayout
    fingerprint: bytes
    range: PartRange
    keys: tuple[bytes, ...]
    """Keys of the blocks `first_key`, `first_key` + 1, ... of the part."""
    first_key: int = 0
    last_block_tokens: int | None = None
    """Valid tokens in the last block; None stands for a full one."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedPart:
    """A verified part. `payload` is a read-only view of the buffer, shape [blocks, layers, heads, 2, block_tokens,
    head_dim], float32, or int16 that holds the bits of bfloat16 or float16."""

    header: PartHeader
    payload: NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class PartDraft:
    """A part being written: fill `payload`, then `seal`. Saves a copy against `encode_part`."""

    header: PartHeader
    buffer: NDArray[np.uint8]
    payload: NDArray[Any]
    """Writable view of the buffer, not initialised; shape and dtype as in `DecodedPart`."""

    def seal(self) -> NDArray[np.uint8]:
        """Zero the slots after the last valid token, write the checksum and return the finished buffer.

        The zeros keep what another request left in those slots from travelling.
        """
        self.payload[-1, :, :, :, self.header.last_block_tokens :, :] = 0
        digest = xxhash.xxh3_128_digest(self.buffer[:-_DIGEST_BYTES].data)
        self.buffer[-_DIGEST_BYTES:] = np.frombuffer(digest, np.uint8)
        return self.buffer


def draft_part(header: PartHeader) -> PartDraft:
    """A fresh buffer with everything but payload and checksum in place. The caller owns it."""
    raw_header = _header_json(header)
    offset = _payload_offset(len(raw_header))
    num_bytes = header.range.num_bytes(header.layout)
    buffer = np.empty(offset + num_bytes + _DIGEST_BYTES, np.uint8)
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(raw_header)) + raw_header
    buffer[:offset] = np.frombuffer(prefix.ljust(offset, b"\0"), np.uint8)
    payload = buffer[offset : offset + num_bytes].view(_RAW_DTYPES[header.layout.dtype])
    return PartDraft(header, buffer, payload.reshape(header.range.shape(header.layout)))


def encode_part(header: PartHeader, payload: NDArray[Any]) -> NDArray[np.uint8]:
    """One contiguous buffer with `payload` copied in. The caller owns it.

    Args:
        payload: [blocks, layers, heads, 2, block_tokens, head_dim] as float32, or as int16 when the layout's dtype is
            bfloat16 or float16 (their bits: numpy has no bfloat16); or its bytes as uint8, in any shape, C order.

    Raises:
        ValueError: shape or dtype do not fit the header.
    """
    draft = draft_part(header)
    target = draft.payload
    source = payload
    if payload.dtype == np.uint8 and payload.nbytes == target.nbytes:
        source = np.ascontiguousarray(payload).reshape(-1).view(target.dtype).reshape(target.shape)
    if source.dtype != target.dtype or source.shape != target.shape:
        raise ValueError(
            f"payload of shape {payload.shape} and dtype {payload.dtype} does not fit the header: give shape "
            f"{target.shape} as {target.dtype}, or {target.nbytes} bytes as uint8"
        )
    target[...] = source
    return draft.seal()


def encoded_bytes(header: PartHeader) -> int:
    """Size in bytes of the buffer that `encode_part` makes for this header."""
    return _payload_offset(len(_header_json(header))) + header.range.num_bytes(header.layout) + _DIGEST_BYTES


def decode_part(buffer: object, expect: PartExpectation) -> DecodedPart:
    """Verify a part and give a view of its payload; nothing is copied, so the view keeps `buffer` alive.

    Args:
        buffer: a contiguous array, bytes or another object with a buffer.

    Raises:
        PartError: anything at all is wrong with it. No other error, whatever the bytes are.
    """
    try:
        data = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(buffer, bytes | bytearray | memoryview | np.ndarray) and len(buffer) == 0:
            raise PartError("truncated", "the buffer is empty") from error
        raise PartError("type", f"{type(buffer).__name__} is no contiguous buffer: {error}") from error
    data = data.view()
    data.flags.writeable = False

    if data.size < _PREFIX.size + _DIGEST_BYTES:
        raise PartError("truncated", f"{data.size} bytes are fewer than any part has")
    offset = payload_offset(data[: _PREFIX.size].tobytes(), data.size)
    digest = xxhash.xxh3_128_digest(data[:-_DIGEST_BYTES].data)
    if digest != data[-_DIGEST_BYTES:].tobytes():
        raise PartError("checksum", "the content is not what was written")

    header = _parse_header(data[:offset].tobytes())
    _compare(header, expect)
    num_bytes = header.range.num_bytes(header.layout)
    _check_size(header, offset, data.size)
    payload = data[offset : offset + num_bytes].view(_RAW_DTYPES[header.layout.dtype])
    return DecodedPart(header, payload.reshape(header.range.shape(header.layout)))


def payload_offset(start: bytes, part_bytes: int) -> int:
    """Where the payload of an encoded part begins, so that its header can be read without it: see `read_header`.

    Args:
        start: the first `PREFIX_BYTES` bytes of the part, or more.
        part_bytes: size of the whole part.

    Raises:
        PartError: magic, version or truncated.
    """
    if len(start) < _PREFIX.size:
        raise PartError("truncated", f"{len(start)} bytes are fewer than any part begins with")
    magic, version, header_bytes = _PREFIX.unpack(start[: _PREFIX.size])
    if magic != _MAGIC:
        raise PartError("magic", f"it begins with {magic!r}")
    if version != FORMAT_VERSION:
        raise PartError("version", f"format version {version}, this code reads {FORMAT_VERSION}")
    offset = _payload_offset(header_bytes)
    if offset + _DIGEST_BYTES > part_bytes:
        raise PartError("truncated", f"a header of {header_bytes} bytes does not fit in {part_bytes}")
    return offset


def read_header(start: bytes, part_bytes: int) -> PartHeader:
    """What a part says of itself. Its checksum covers the payload too, so nothing is verified here but the form.

    Args:
        start: the bytes of the part before its payload (`payload_offset` says how many), or more.
        part_bytes: size of the whole part.

    Raises:
        PartError: it is no header, or one of a part of another size.
    """
    offset = payload_offset(start, part_bytes)
    if len(start) < offset:
        raise PartError("truncated", f"{len(start)} of the {offset} bytes before the payload")
    header = _parse_header(start[:offset])
    _check_size(header, offset, part_bytes)
    return header


def _check_size(header: PartHeader, offset: int, part_bytes: int) -> None:
    expected = offset + header.range.num_bytes(header.layout) + _DIGEST_BYTES
    if part_bytes != expected:
        raise PartError("size", f"{part_bytes} bytes, the header tells of {expected}")


def _compare(header: PartHeader, expect: PartExpectation) -> None:
    layout = expect.layout
    last_block_tokens = layout.block_tokens if expect.last_block_tokens is None else expect.last_block_tokens
    for reason, found, wanted in (
        ("fingerprint", header.fingerprint.hex(), expect.fingerprint.hex()),
        ("dtype", header.layout.dtype, layout.dtype),
        ("layout", header.layout, layout),
        ("range", header.range, expect.range),
        ("tokens", header.last_block_tokens, last_block_tokens),
    ):
        if found != wanted:
            raise PartError(reason, f"it has {found}, expected {wanted}")
    if header.keys[expect.first_key : expect.first_key + len(expect.keys)] != expect.keys:
        raise PartError("keys", f"it holds other blocks than the {len(expect.keys)} expected")


def _header_json(header: PartHeader) -> bytes:
    fields = {
        "fingerprint": header.fingerprint.hex(),
        "format": FORMAT_VERSION,
        "keys": [key.hex() for key in header.keys],
        "last_block_tokens": header.last_block_tokens,
        "layout": asdict(header.layout),
        "range": asdict(header.range),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")


def _parse_header(start: bytes) -> PartHeader:
    """`start` is all that comes before the payload; magic, version and length were found right."""
    raw = start[_PREFIX.size : _PREFIX.size + _PREFIX.unpack(start[: _PREFIX.size])[2]]
    try:
        fields = json.loads(raw)
        header = PartHeader(
            layout=KvLayout(**fields["layout"]),
            fingerprint=bytes.fromhex(fields["fingerprint"]),
            range=PartRange(**fields["range"]),
            keys=tuple(bytes.fromhex(key) for key in fields["keys"]),
            last_block_tokens=fields["last_block_tokens"],
        )
        # The canonical form is unique: this also refuses unknown or repeated fields and another format version.
        is_canonical = _header_json(header) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PartError("header", f"not a header: {error!r}") from error
    if not is_canonical:
        raise PartError("header", "not in canonical form")
    return header


def _payload_offset(header_bytes: int) -> int:
    return -(-(_PREFIX.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT
