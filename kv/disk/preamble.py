"""What stands at the beginning of an extent's file, and where its parts lie. Bytes and arithmetic, no files.

    offset  size
    0       8      magic
    8       4      format version, unsigned little endian
    12      4      length of the description in bytes, unsigned little endian
    16      n      description: canonical JSON (sorted keys, no spaces, ASCII)
    16+n    16     xxh3_128 over everything before
    ...     ...    zeros up to a multiple of 4096, where the first part begins
    ...     ...    the parts as in memory (`kv.parts`), each beginning at a multiple of 4096, zeros between them

The file ends with its last part. The description has the format version, the key of the block before the extent
("parent", null at the start of a chain), the size of each part, and one xxh3_128 over all that comes before the
payloads of the parts, so that an index made without reading payloads is verified all the same.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kv.errors import PartError
from kv.keys import KEY_BYTES

FORMAT_VERSION = 2
"""Version 1 had names that did not end with the root (`kv.shards`); inside, files were the same."""
ALIGNMENT = 4096
"""Parts begin at multiples of it: pages of a memory mapping and blocks of the usual file systems."""

START = struct.Struct("<8sII")
DIGEST_BYTES = 16

_MAGIC = b"EQPZEXTN"
_MAX_DESCRIPTION_BYTES = 1024 * 1024
_LONGEST_PARENT = bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Preamble:
    """A file's description. Trusted once `parse` returned it."""

    parent: bytes | None
    part_bytes: tuple[int, ...]
    headers_digest: bytes
    """xxh3_128 over what comes before the payload of each part, one after the other."""

    def encode(self) -> bytes:
        """The first bytes of the file, up to the zeros.

        Raises:
            ValueError: more parts than a file may have, or a parent that is no key.
        """
        if self.parent is not None and len(self.parent) != KEY_BYTES:
            raise ValueError(f"a parent of {len(self.parent)} bytes is not allowed: give a key of {KEY_BYTES}, or None")
        raw = _description(self)
        if len(raw) > _MAX_DESCRIPTION_BYTES:
            raise ValueError(f"{len(self.part_bytes)} parts are too many for one file: cut the blocks into fewer")
        body = START.pack(_MAGIC, FORMAT_VERSION, len(raw)) + raw
        return body + xxhash.xxh3_128_digest(body)


def encoded_length(start: bytes) -> int:
    """Bytes of a preamble up to the zeros, from its first bytes.

    Raises:
        PartError: truncated, magic, version, or a length that no preamble has.
    """
    if len(start) < START.size:
        raise PartError("truncated", f"the file has {len(start)} bytes")
    magic, version, length = START.unpack(start[: START.size])
    if magic != _MAGIC:
        raise PartError("magic", f"the file begins with {magic!r}")
    if version != FORMAT_VERSION:
        raise PartError("version", f"the file's format version is {version}, this code reads {FORMAT_VERSION}")
    if length > _MAX_DESCRIPTION_BYTES:
        raise PartError("header", f"a description of {length} bytes")
    return START.size + int(length) + DIGEST_BYTES


def parse(encoded: bytes) -> Preamble:
    """The preamble that these bytes, all of it up to the zeros, are.

    Raises:
        PartError: they are none.
    """
    length = encoded_length(encoded)
    if len(encoded) != length:
        raise PartError("truncated", f"{len(encoded)} of {length} bytes of the file's preamble")
    if xxhash.xxh3_128_digest(encoded[:-DIGEST_BYTES]) != encoded[-DIGEST_BYTES:]:
        raise PartError("checksum", "the file's preamble is not what was written")
    raw = encoded[START.size : -DIGEST_BYTES]
    try:
        fields = json.loads(raw)
        parent = fields["parent"]
        preamble = Preamble(
            parent=None if parent is None else bytes.fromhex(parent),
            part_bytes=tuple(fields["part_bytes"]),
            headers_digest=bytes.fromhex(fields["headers"]),
        )
        # The canonical form is unique: this also refuses unknown or repeated fields and another format version.
        is_canonical = _description(preamble) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PartError("header", f"not a description: {error!r}") from error
    sizes = preamble.part_bytes
    if (
        not is_canonical
        or not sizes
        or any(type(size) is not int or size < 1 for size in sizes)
        or (preamble.parent is not None and len(preamble.parent) != KEY_BYTES)
        or len(preamble.headers_digest) != DIGEST_BYTES
    ):
        raise PartError("header", "a description that is not allowed")
    return preamble


def part_offsets(part_bytes: Sequence[int]) -> list[int]:
    """Where each part begins. Depends on nothing but the sizes: with or without a parent it is the same."""
    longest = _description(Preamble(_LONGEST_PARENT, tuple(part_bytes), bytes(DIGEST_BYTES)))
    offset = round_up(START.size + len(longest) + DIGEST_BYTES)
    offsets = []
    for size in part_bytes:
        offsets.append(offset)
        offset = round_up(offset + size)
    return offsets


def file_bytes(part_bytes: Sequence[int]) -> int:
    """Length of the file.

    Raises:
        ValueError: there are no parts.
    """
    if not part_bytes:
        raise ValueError("an extent without parts has no file: give at least one")
    return part_offsets(part_bytes)[-1] + part_bytes[-1]


def round_up(num_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`: what a file of so many bytes takes on disk."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _description(preamble: Preamble) -> bytes:
    fields = {
        "format": FORMAT_VERSION,
        "headers": preamble.headers_digest.hex(),
        "parent": None if preamble.parent is None else preamble.parent.hex(),
        "part_bytes": list(preamble.part_bytes),
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("ascii")
