"""The header of a frame: what a message is and how large its parts are, packed into bytes and checked on arrival.

Little endian: 6 bytes of magic, format version (uint16), xxh3_64 of the rest of the header (uint64); frame type
(uint8, 3 unused), kind (int32), epoch, work id and placement version (int64), number of tensors (uint32), bytes of
their shapes (uint32), bytes of `meta` (uint64); then for each tensor the code of its dtype and its number of
dimensions (uint8 each) and each dimension (int64).

Memory is allocated, and reads are posted, by what a header says. So all of it is under its checksum, and within limits.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash

from migrate.links.interface import DTYPES, MAX_DIMS, MAX_TENSORS, LinkError

FORMAT_VERSION = 1
_MAGIC = b"eqlink"
_PREFIX = struct.Struct("<6sHQ")
_FIELDS = struct.Struct("<B3xiqqqIIQ")
_TENSOR = struct.Struct("<BB")
_DIM_BYTES = 8
_MAX_STRIDE = 1 << 60
_FIXED_BYTES = _PREFIX.size + _FIELDS.size
MAX_HEADER_BYTES = _FIXED_BYTES + MAX_TENSORS * (_TENSOR.size + MAX_DIMS * _DIM_BYTES)


class FrameType(IntEnum):
    """What a frame is for."""

    MESSAGE = 0
    HEARTBEAT = 1
    """The sender lives and has nothing to say."""
    GOODBYE = 2
    """The sender's last frame; `meta` is the reason."""
    HELLO = 3
    """The sender's first frame; `meta` is how it is set up."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """What must be known of a tensor to allocate it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """One frame's header, as fields."""

    type: FrameType
    epoch: int
    kind: int = 0
    work_id: int = 0
    version: int = 0
    meta_bytes: int = 0
    tensors: tuple[TensorShape, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the header itself."""
        return _FIXED_BYTES + sum(_TENSOR.size + len(tensor.shape) * _DIM_BYTES for tensor in self.tensors)

    def pack(self) -> bytes:
        """The header as bytes. Values must be such as `check_message` allows."""
        shapes = b"".join(
            _TENSOR.pack(DTYPES.index(tensor.dtype), len(tensor.shape))
            + struct.pack(f"<{len(tensor.shape)}q", *tensor.shape)
            for tensor in self.tensors
        )
        checked = (
            _FIELDS.pack(
                self.type,
                self.kind,
                self.epoch,
                self.work_id,
                self.version,
                len(self.tensors),
                len(shapes),
                self.meta_bytes,
            )
            + shapes
        )
        return _PREFIX.pack(_MAGIC, FORMAT_VERSION, xxhash.xxh3_64_intdigest(checked)) + checked


def unpack(frame: memoryview, epoch: int, max_payload_bytes: int) -> Header:
    """The header at the beginning of `frame`, which may go on with anything.

    Args:
        frame: bytes as received.
        epoch: of the link.
        max_payload_bytes: most that `meta` and tensors may take together.

    Raises:
        LinkError: no header, one of another format, damaged, of another epoch, or one that says more than is allowed.
    """
    if len(frame) < _FIXED_BYTES:
        raise LinkError(f"a frame has {len(frame)} bytes; a header takes at least {_FIXED_BYTES}")
    magic, format_version, checksum = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise LinkError(f"a frame begins with {magic.hex()}: that is no header of a link")
    if format_version != FORMAT_VERSION:
        raise LinkError(
            f"the peer writes format {format_version} of links, this worker {FORMAT_VERSION}: run the same release on "
            "both"
        )
    frame_type, kind, header_epoch, work_id, version, num_tensors, shapes_bytes, meta_bytes = _FIELDS.unpack_from(
        frame, _PREFIX.size
    )
    end = _FIXED_BYTES + shapes_bytes
    if end > min(len(frame), MAX_HEADER_BYTES):
        raise LinkError(f"a header claims {end} bytes; allowed are {min(len(frame), MAX_HEADER_BYTES)}")
    if xxhash.xxh3_64_intdigest(frame[_PREFIX.size : end]) != checksum:
        raise LinkError("a header's checksum is wrong: it was damaged on its way or where it was made")
    if header_epoch != epoch:
        raise LinkError(f"a frame of epoch {header_epoch} came over a link of epoch {epoch}")
    if frame_type not in FrameType.__members__.values():
        raise LinkError(f"a frame has type {frame_type}; known are {', '.join(map(str, map(int, FrameType)))}")
    if min(kind, work_id, version) < 0:
        raise LinkError(f"a header has kind {kind}, work id {work_id} and version {version}; none may be negative")
    header = Header(
        FrameType(frame_type),
        epoch,
        kind,
        work_id,
        version,
        meta_bytes,
        _unpack_shapes(frame[_FIXED_BYTES:end], num_tensors),
    )
    payload_bytes = meta_bytes + sum(tensor.num_bytes for tensor in header.tensors)
    if payload_bytes > max_payload_bytes:
        raise LinkError(
            f"a header announces {payload_bytes} bytes; allowed are {max_payload_bytes}: give both workers the same "
            "max_message_bytes"
        )
    return header


def _unpack_shapes(data: memoryview, num_tensors: int) -> tuple[TensorShape, ...]:
    if num_tensors > MAX_TENSORS:
        raise LinkError(f"a header announces {num_tensors} tensors; allowed are {MAX_TENSORS}")
    tensors = []
    start = 0
    for index in range(num_tensors):
        if len(data) - start < _TENSOR.size:
            raise LinkError(f"a header ends before tensor {index} of {num_tensors}")
        code, num_dims = _TENSOR.unpack_from(data, start)
        start += _TENSOR.size
        if code >= len(DTYPES) or num_dims > MAX_DIMS or len(data) - start < num_dims * _DIM_BYTES:
            raise LinkError(
                f"tensor {index} of a header has dtype {code} of {len(DTYPES)} and {num_dims} dimensions, with "
                f"{len(data) - start} bytes left; allowed are {MAX_DIMS} dimensions of {_DIM_BYTES} bytes"
            )
        shape = struct.unpack_from(f"<{num_dims}q", data, start)
        start += num_dims * _DIM_BYTES
        # An empty tensor has strides too, which must be numbers that torch can have.
        if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) > _MAX_STRIDE:
            raise LinkError(
                f"tensor {index} of a header has shape {list(shape)}; no dimension may be negative, nor may all "
                f"that are not 0 make more than {_MAX_STRIDE}"
            )
        tensors.append(TensorShape(DTYPES[code], shape))
    if start != len(data):
        raise LinkError(f"a header has {len(data) - start} bytes after its last tensor")
    return tuple(tensors)
