"""Extents with random content, and places to write them where a disk has its faults."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kv.disk.open_extent import OpenExtent
from kv.disk.read_buffer import ReadBuffer
from kv.layout import KvLayout
from kv.part_range import PartRange
from kv.parts import PartHeader, decode_part, encode_part

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_tokens=4, dtype="float32")
BIG = KvLayout(num_layers=4, num_kv_heads=8, head_dim=64, block_tokens=64, dtype="float32")
"""A block has 1 MiB."""


@dataclass(frozen=True)
class Extent:
    """What a store would write."""

    parent: bytes | None
    headers: tuple[PartHeader, ...]
    buffers: list[NDArray[np.uint8]]

    @property
    def sizes(self) -> list[int]:
        return [len(buffer) for buffer in self.buffers]

    @property
    def keys(self) -> tuple[bytes, ...]:
        return self.headers[0].keys


def random_part(header: PartHeader, seed: int) -> NDArray[np.uint8]:
    payload = np.random.default_rng(seed).integers(0, 256, header.range.num_bytes(header.layout), np.uint8)
    return encode_part(header, payload)


def chain_keys(num_blocks: int, chain: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{chain}/{block}".encode()).digest() for block in range(num_blocks)]


def make_extent(
    num_blocks: int = 2,
    *,
    first_block: int = 0,
    layout: KvLayout = LAYOUT,
    fingerprint: bytes = b"model",
    layer_groups: int = 1,
    seed: int = 0,
) -> Extent:
    """One extent of small parts, one for each group of layers (fewer where there are fewer layers)."""
    keys = chain_keys(first_block + num_blocks, seed)
    borders = sorted({group * layout.num_layers // layer_groups for group in range(layer_groups + 1)})
    headers = tuple(
        PartHeader(
            layout,
            fingerprint,
            PartRange(first_block, num_blocks, start, stop - start, 0, layout.num_kv_heads),
            tuple(keys[first_block:]),
            layout.block_tokens,
        )
        for start, stop in pairwise(borders)
    )
    parent = keys[first_block - 1] if first_block > 0 else None
    return Extent(parent, headers, [random_part(header, seed + index) for index, header in enumerate(headers)])


def parts_of(file: OpenExtent) -> list[NDArray[np.uint8]]:
    """All that it holds, each in memory of its own."""
    return [file.read(part, ReadBuffer()) for part in range(len(file.part_bytes))]


def read_parts(path: Path) -> list[NDArray[np.uint8]]:
    """As a store reads them."""
    with OpenExtent(path) as file:
        return parts_of(file)


def assert_decodes_to(parts: list[Any], extent: Extent) -> None:
    assert len(parts) == len(extent.buffers)
    for part, header, buffer in zip(parts, extent.headers, extent.buffers, strict=True):
        decode_part(part, header.expectation())
        np.testing.assert_array_equal(part, buffer)


def taken_bytes(folder: Path) -> int:
    """What `du` would count, without the folders themselves."""
    files = [Path(inner) / name for inner, _, names in os.walk(folder) for name in names]
    return sum(os.lstat(path).st_blocks * 512 for path in files)


@contextmanager
def without_privileges() -> Iterator[None]:
    """As a user that owns none of the files; does nothing for whoever is not root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """No file in it can be made or removed, as on a disk that turned read-only."""
    folders = [str(folder), *(str(path) for path in folder.glob("??"))]
    if subprocess.run(["chattr", "+i", *folders], capture_output=True).returncode != 0:
        pytest.skip("a folder cannot be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *folders], check=True)


@contextmanager
def mounted_disk(folder: Path, *options: str) -> Iterator[Path]:
    """A file system in memory; the test is skipped where mounting is not permitted."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "equipoise-test", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting is not permitted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a test that failed may hold files open
