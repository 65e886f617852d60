from __future__ import annotations

import json
import os
import resource
import struct
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.disk.extent_file import ExtentIndex, read_index, verify_file, write_extent
from kv.errors import DiskWriteError, PartError
from kv.layout import DTYPE_BYTES, KvLayout
from kv.part_range import PartRange
from kv.parts import PartHeader, decode_part
from tests.kv.disk.extents_to_write import (
    BIG,
    LAYOUT,
    Extent,
    assert_decodes_to,
    chain_keys,
    make_extent,
    mounted_disk,
    random_part,
    read_parts,
    without_privileges,
)

READERS: list[Callable[[Path], Any]] = [read_index, read_parts, verify_file]
EXTENT = make_extent(3, first_block=2, layer_groups=2)
PARENT = chain_keys(2)[1].hex()


def forged_file(
    parts: Sequence[bytes],
    parent: str | None,
    *,
    version: int = 2,
    raw: bytes | None = None,
    headers: str | None = None,
) -> bytes:
    """A file with right checksums around any content, written from the format's description."""
    starts = b""
    for part in parts:
        (header_bytes,) = struct.unpack("<I", part[12:16])
        starts += part[: (16 + header_bytes + 63) // 64 * 64]
    digest = xxhash.xxh3_128(starts).hexdigest() if headers is None else headers
    fields = {"format": 2, "headers": digest, "parent": parent, "part_bytes": [len(part) for part in parts]}
    if raw is None:
        raw = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    body = b"EQPZEXTN" + struct.pack("<II", version, len(raw)) + raw
    content = body + xxhash.xxh3_128(body).digest()
    for part in parts:
        content += b"\0" * (-len(content) % 4096) + part
    return content


def forged_extent(extent: Extent, **changes: Any) -> bytes:
    parent = None if extent.parent is None else extent.parent.hex()
    return forged_file([buffer.tobytes() for buffer in extent.buffers], parent, **changes)


def reason_of(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(PartError) as caught:
        read(path)
    return caught.value.reason


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.kv"
    write_extent(path, EXTENT.parent, EXTENT.buffers)
    return path


@pytest.mark.parametrize("extent", [EXTENT, make_extent(1), make_extent(40, layer_groups=4)], ids=["end", "root", "4"])
def test_the_format_is_as_described(tmp_path: Path, extent: Extent) -> None:
    path = tmp_path / "extent.kv"
    write_extent(path, extent.parent, extent.buffers)
    assert path.read_bytes() == forged_extent(extent)
    assert [entry.name for entry in tmp_path.iterdir()] == ["extent.kv"]
    assert path.stat().st_mode & 0o077 == 0, "others could read what was said"


LAYOUTS = st.builds(
    KvLayout,
    num_layers=st.integers(1, 5),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 4, 64]),
    block_tokens=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)


@settings(max_examples=60, deadline=None)
@given(LAYOUTS, st.integers(1, 30), st.integers(0, 3), st.binary(min_size=1, max_size=40), st.integers(1, 5))
def test_what_was_written_is_read(
    layout: KvLayout, num_blocks: int, first_block: int, fingerprint: bytes, layer_groups: int
) -> None:
    extent = make_extent(
        num_blocks, first_block=first_block, layout=layout, fingerprint=fingerprint, layer_groups=layer_groups
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "extent.kv"
        write_extent(path, extent.parent, [memoryview(buffer) for buffer in extent.buffers])
        index = read_index(path)
        assert index == ExtentIndex(
            layout,
            fingerprint,
            extent.parent,
            first_block,
            extent.keys,
            tuple(header.range for header in extent.headers),
            tuple(extent.sizes),
        )
        assert verify_file(path) == index
        assert index.num_bytes == sum(extent.sizes)
        assert 0 <= index.disk_bytes - path.stat().st_size < 4096 == 4096 - index.disk_bytes % 4096
        assert_decodes_to(read_parts(path), extent)


def test_a_flipped_bit_never_gives_wrong_bytes(good: Path) -> None:
    content, index = bytearray(good.read_bytes()), read_index(good)
    damaged = good.with_name("damaged.kv")
    silent: set[str] = set()
    for position in range(0, len(content), 97):
        content[position] ^= 1 << (position % 8)
        damaged.write_bytes(content)
        reason_of(verify_file, damaged)
        for read in (read_index, read_parts):
            try:
                found = read(damaged)
            except PartError:
                continue
            silent.add(read.__name__)
            if read is read_index:
                assert found == index
                continue
            for part, header, buffer in zip(found, EXTENT.headers, EXTENT.buffers, strict=True):
                try:
                    decode_part(part, header.expectation())
                except PartError:
                    continue
                np.testing.assert_array_equal(part, buffer)
        content[position] ^= 1 << (position % 8)
    assert silent == {"read_index", "read_parts"}, (
        "payloads are not read for the index, nor verified where they are only read"
    )


@settings(deadline=None)
@given(st.data())
def test_a_file_that_was_cut_or_grew_is_refused(data: st.DataObject) -> None:
    content = forged_extent(EXTENT)
    size = data.draw(st.integers(0, len(content) - 1))
    appendix = data.draw(st.binary(min_size=1, max_size=9))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "extent.kv"
        for read in READERS:
            path.write_bytes(content[:size])
            assert reason_of(read, path) == "truncated"
            path.write_bytes(content + appendix)
            assert reason_of(read, path) == "size"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(junk: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "extent.kv"
        for content in (
            junk,
            b"EQPZEXTN" + junk,
            b"EQPZEXTN" + struct.pack("<I", 2) + junk,
            forged_file([], None) + junk,
        ):
            path.write_bytes(content)
            for read in READERS:
                reason_of(read, path)


def canonical(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


SIZES = [len(buffer) for buffer in EXTENT.buffers]
DIGEST = json.loads(forged_extent(EXTENT)[16:].split(b"}")[0] + b"}")["headers"]
FIELDS = {"format": 2, "headers": DIGEST, "parent": PARENT, "part_bytes": SIZES}


@pytest.mark.parametrize(
    "raw",
    [
        canonical(FIELDS | {"extra": 1}),
        canonical({name: value for name, value in FIELDS.items() if name != "parent"}),
        canonical(FIELDS | {"format": 1}),
        canonical(FIELDS | {"parent": "00"}),
        canonical(FIELDS | {"parent": "xy" * 32}),
        canonical(FIELDS | {"parent": PARENT.upper()}),
        canonical(FIELDS | {"headers": DIGEST[2:]}),
        canonical(FIELDS | {"part_bytes": []}),
        canonical(FIELDS | {"part_bytes": [SIZES[0], True]}),
        canonical(FIELDS | {"part_bytes": [SIZES[0], 0]}),
        canonical(FIELDS | {"part_bytes": [SIZES[0], -SIZES[1]]}),
        canonical(FIELDS | {"part_bytes": [SIZES[0], float(SIZES[1])]}),
        canonical(FIELDS | {"part_bytes": "12"}),
        canonical([FIELDS]),
        b" " + canonical(FIELDS),
        b"\xff",
        b"[" * 100_000,
        b"",
    ],
)
def test_another_description_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "extent.kv"
    path.write_bytes(forged_extent(EXTENT, raw=raw))
    assert {reason_of(read, path) for read in READERS} == {"header"}


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "extent.kv"
    for version in (1, 3):
        path.write_bytes(forged_extent(EXTENT, version=version))
        assert {reason_of(read, path) for read in READERS} == {"version"}
    part = EXTENT.buffers[0].tobytes()
    path.write_bytes(forged_file([part[:8] + b"\2" + part[9:], EXTENT.buffers[1].tobytes()], PARENT))
    assert reason_of(read_index, path) == reason_of(verify_file, path) == "version"


def test_an_index_is_verified_without_the_payloads(tmp_path: Path) -> None:
    path = tmp_path / "extent.kv"
    content = forged_extent(EXTENT)
    path.write_bytes(content.replace(EXTENT.keys[0].hex().encode(), b"0" * 64))
    assert reason_of(read_index, path) == "checksum"
    path.write_bytes(forged_extent(EXTENT, headers="0" * 32))
    assert reason_of(read_index, path) == "checksum"


def one_part(part: PartRange, fingerprint: bytes = b"model", layout: KvLayout = LAYOUT, **changes: Any) -> PartHeader:
    keys = tuple(chain_keys(part.first_block + part.num_blocks)[part.first_block :])
    return replace(PartHeader(layout, fingerprint, part, keys, layout.block_tokens), **changes)


WHOLE = one_part(PartRange(0, 2, 0, 4, 0, 2))
LOWER, UPPER = one_part(PartRange(0, 2, 0, 2, 0, 2)), one_part(PartRange(0, 2, 2, 2, 0, 2))
NEXT = one_part(PartRange(2, 3, 0, 4, 0, 2))
ROOT = chain_keys(1)[0]

NO_EXTENTS: list[tuple[str, bytes | None, list[PartHeader], str]] = [
    ("layers missing", None, [LOWER], "lanes"),
    ("layers twice", None, [WHOLE, WHOLE], "lanes"),
    ("layers overlap", None, [LOWER, UPPER, UPPER], "lanes"),
    ("heads missing", None, [one_part(PartRange(0, 2, 0, 4, 0, 1))], "lanes"),
    ("a gap", None, [WHOLE, one_part(PartRange(3, 1, 0, 4, 0, 2))], "range"),
    ("blocks overlap", None, [WHOLE, one_part(PartRange(1, 2, 0, 4, 0, 2))], "range"),
    ("uneven blocks", None, [WHOLE, one_part(PartRange(0, 1, 0, 4, 0, 2))], "range"),
    ("two models", None, [LOWER, replace(UPPER, fingerprint=b"other")], "fingerprint"),
    (
        "two layouts",
        None,
        [LOWER, one_part(PartRange(0, 2, 2, 2, 0, 2), layout=replace(LAYOUT, dtype="bfloat16"))],
        "fingerprint",
    ),
    ("a tail", None, [replace(WHOLE, keys=WHOLE.keys[:1], last_block_tokens=3)], "tokens"),
    ("two chains", None, [LOWER, replace(UPPER, keys=UPPER.keys[::-1])], "keys"),
    ("a parent before the first block", ROOT, [WHOLE], "keys"),
    ("no parent", None, [NEXT], "keys"),
]


@pytest.mark.parametrize(
    ("parent", "headers", "reason"), [case[1:] for case in NO_EXTENTS], ids=[case[0] for case in NO_EXTENTS]
)
def test_what_is_no_extent_is_neither_written_nor_read(
    tmp_path: Path, parent: bytes | None, headers: list[PartHeader], reason: str
) -> None:
    buffers = [random_part(header, 0) for header in headers]
    path = tmp_path / "extent.kv"
    with pytest.raises(PartError) as caught:
        write_extent(path, parent, buffers)
    assert caught.value.reason == reason
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(forged_file([buffer.tobytes() for buffer in buffers], parent.hex() if parent else None))
    assert reason_of(read_index, path) == reason_of(verify_file, path) == reason


def test_an_extent_may_have_several_runs_of_blocks(tmp_path: Path) -> None:
    path = tmp_path / "extent.kv"
    headers = [NEXT, UPPER, LOWER]
    write_extent(path, None, [random_part(header, 0) for header in headers])
    index = verify_file(path)
    assert index.keys == tuple(chain_keys(5))
    assert index.ranges == (NEXT.range, UPPER.range, LOWER.range)


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([], "lanes"),
        ([EXTENT.buffers[0][::2]], "type"),
        ([None], "type"),
        ([b""], "truncated"),
        ([EXTENT.buffers[0][:-1]], "size"),
        ([b"not a part, but long enough for one"], "magic"),
    ],
)
def test_what_is_no_part_is_not_written(tmp_path: Path, buffers: list[Any], reason: str) -> None:
    with pytest.raises(PartError) as caught:
        write_extent(tmp_path / "extent.kv", EXTENT.parent, buffers)
    assert caught.value.reason == reason
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_no_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="32"):
        write_extent(tmp_path / "extent.kv", b"short", EXTENT.buffers)


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    target = path.with_name("target.kv")
    write_extent(target, EXTENT.parent, EXTENT.buffers)
    path.symlink_to(target)


@pytest.mark.parametrize("make", [make_folder, make_link, os.mkfifo], ids=["folder", "link", "pipe"])
@pytest.mark.parametrize("read", READERS)
def test_what_is_no_file_is_refused(tmp_path: Path, read: Callable[[Path], Any], make: Callable[[Path], None]) -> None:
    path = tmp_path / "extent.kv"
    make(path)
    assert reason_of(read, path) == "type"


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_is_missing_or_unreadable_is_refused(good: Path, read: Callable[[Path], Any]) -> None:
    assert reason_of(read, good.with_name("other.kv")) == "gone"
    good.chmod(0)
    with without_privileges():
        assert reason_of(read, good) == "unreadable"


@pytest.mark.parametrize("read", READERS)
def test_too_many_open_files_are_no_other_error(good: Path, read: Callable[[Path], Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert reason_of(read, good) == "unreadable"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def refused_write(path: Path, extent: Extent) -> str:
    with pytest.raises(DiskWriteError) as caught:
        write_extent(path, extent.parent, extent.buffers)
    assert list(path.parent.iterdir()) == []
    assert caught.value.reason in str(caught.value)
    assert str(path) in str(caught.value)
    return caught.value.reason


def test_a_disk_that_gets_full_has_nothing_left_of_the_extent(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "size=1m") as disk:
        assert refused_write(disk / "extent.kv", make_extent(1, layout=BIG)) == "disk_full"
        write_extent(disk / "small.kv", EXTENT.parent, EXTENT.buffers)
        verify_file(disk / "small.kv")


def test_a_write_that_breaks_off_has_nothing_left_of_the_extent(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        assert refused_write(tmp_path / "extent.kv", make_extent(1, layout=BIG)) == "disk_error"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_read_only_disk_refuses(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "size=1m,ro") as disk:
        assert refused_write(disk / "extent.kv", EXTENT) == "disk_read_only"
