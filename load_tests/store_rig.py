"""The global store without an app, for measurements: its actors in a Ray session of their own, and a stand-in for the
worker that gives KV."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from kv.actor_calls import Actor
from kv.directory_actor import DirectoryActor
from kv.directory_client import DirectoryClient
from kv.disk.settings import DiskSettings
from kv.extents import Lookup, PullReceipt
from kv.fetch import fetch_parts
from kv.layout import KvLayout
from kv.node_store import NodeStore
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from kv.tiers import Tier
from kv.wire import LookupRequest, pack_request, unpack_lookup

LAYOUT = KvLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_tokens=16, dtype="bfloat16")
"""512 KiB a block: KV of a model of a billion parameters."""
FINGERPRINT = b"store-rig"
LIMIT_S = 120.0
"""For any one thing that is waited for."""


class StoreRigError(Exception):
    """The store did not do what is to be measured; the message says what it did."""


@contextmanager
def local_ray(object_store_bytes: int) -> Iterator[None]:
    """A Ray session of this process alone, whatever else runs on the machine."""
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def new_keys(num_blocks: int) -> list[bytes]:
    """Keys of a chain that nobody has."""
    return [os.urandom(32) for _ in range(num_blocks)]


def payload_of(num_blocks: int) -> NDArray[np.int16]:
    """The KV of so many blocks, the same in every part: [blocks, layers, heads, 2, block_tokens, head_dim]."""
    shape = (num_blocks, *PartRange(0, 1, 0, LAYOUT.num_layers, 0, LAYOUT.num_kv_heads).shape(LAYOUT)[1:])
    return np.random.default_rng(1).integers(-(2**15), 2**15, shape, dtype=np.int16)


class Giver:
    """Gives KV as a worker does: copies it into parts and writes their checksums, when it is asked."""

    def __init__(self, max_blocks: int) -> None:
        self._pages = payload_of(max_blocks)
        self._keys: list[bytes] = []

    def offer(self, keys: list[bytes]) -> None:
        """What the next exports are of."""
        self._keys = keys

    def export(self, export_id: str, ranges: list[PartRange]) -> list[NDArray[np.uint8]]:
        """See `kv.puller`."""
        parts = []
        for part in ranges:
            keys = tuple(self._keys[part.first_block : part.first_block + part.num_blocks])
            draft = draft_part(PartHeader(LAYOUT, FINGERPRINT, part, keys, LAYOUT.block_tokens))
            draft.payload[...] = self._pages[: part.num_blocks]
            parts.append(draft.seal())
        return parts


class StoreRig:
    """A node's store whose parts hold `part_blocks` blocks each, with a directory and a giver of its own.

    Args:
        folder: for its disk tier; not there yet.
        limit_bytes: of each tier.
    """

    def __init__(self, folder: Path, part_blocks: int, limit_bytes: int) -> None:
        self.part_blocks = part_blocks
        self.folder = folder
        self._limit_bytes = limit_bytes
        store: Any = NodeStore
        directory: Any = DirectoryActor
        self._directory = directory.remote()
        self._giver: Actor = ray.remote(num_cpus=0)(Giver).remote(part_blocks)
        self._store: Actor = store.remote(
            "rig",
            [self._directory],
            limit_bytes,
            disk=DiskSettings(str(folder), limit_bytes),
            max_part_bytes=part_blocks * LAYOUT.block_bytes,
        )
        self._pulls = 0

    def close(self) -> None:
        """Ends its actors, and with them all that it holds."""
        for actor in (self._store, self._directory, self._giver):
            ray.kill(actor)

    def files(self) -> list[Path]:
        """Of the extents that are on disk."""
        return sorted(self.folder.rglob("*.kv"))

    def put(self, keys: list[bytes]) -> float:
        """Seconds until the store has pulled a chain and it is visible. Writing it to disk begins then."""
        _get(self._giver.offer.remote(keys))
        self._pulls += 1
        num_tokens = len(keys) * LAYOUT.block_tokens
        started_s = time.perf_counter()
        receipt: PullReceipt = _get(
            self._store.pull.remote(self._giver, f"chain-{self._pulls}", keys, num_tokens, LAYOUT, FINGERPRINT)
        )
        elapsed_s = time.perf_counter() - started_s
        if receipt.num_stored_blocks != len(keys):
            raise StoreRigError(f"{receipt.num_stored_blocks} of {len(keys)} blocks were stored: {receipt.refusals}")
        return elapsed_s

    def flush(self) -> float:
        """Seconds until nothing waits to be written to disk."""
        started_s = time.perf_counter()
        if not _get(self._store.flush.remote(LIMIT_S)):
            raise StoreRigError(f"the disk did not take it all in {LIMIT_S:g} s")
        return time.perf_counter() - started_s

    def leave_on_disk_only(self) -> None:
        """Frees DRAM, and nothing else."""
        _get(self._store.set_limits.remote(0, None))
        _get(self._store.set_limits.remote(self._limit_bytes, None))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Frees a chain in all tiers."""
        found = self._look_up(keys)
        self._release(found)
        extent_ids = [piece.extent_id for piece in found.slices]
        for extent_id in extent_ids:
            _get(self._directory.drop_extent.remote(extent_id))
        _get(self._store.drop.remote(extent_ids))

    def read(self, keys: Sequence[bytes], tier: Tier, target: NDArray[np.int16]) -> float:
        """Seconds until a chain has been fetched, verified and copied once into `target`. The lookup comes before.

        Raises:
            StoreRigError: it came from another tier, or not all of it came, or not the right values.
        """
        found = self._look_up(keys)
        tiers = {piece.tier for piece in found.slices}
        if found.num_blocks != len(keys) or tiers != {tier}:
            self._release(found)
            raise StoreRigError(f"{found.num_blocks} of {len(keys)} blocks are in {tiers}, not all of them in {tier}")
        misses: list[str] = []
        target[...] = 0

        async def fetch() -> float:
            started_s = time.perf_counter()
            fetched = fetch_parts(
                DirectoryClient([self._directory]),
                {"rig": self._store},
                found,
                keys,
                LAYOUT,
                FINGERPRINT,
                timeout_s=LIMIT_S,
                on_miss=lambda label, num_blocks: misses.append(label),
            )
            async with aclosing(fetched):
                async for piece in fetched:
                    lanes = piece.part.header.range
                    target[
                        piece.first_block : piece.first_block + piece.num_blocks,
                        lanes.first_layer : lanes.first_layer + lanes.num_layers,
                        lanes.first_head : lanes.first_head + lanes.num_heads,
                    ] = piece.part.payload[piece.first : piece.first + piece.num_blocks]
            return time.perf_counter() - started_s

        elapsed_s = asyncio.run(fetch())
        self._release(found)  # the reader would do it a moment later: what comes next must not find it held
        if misses:
            raise StoreRigError(f"not all of {len(keys)} blocks came: {misses}")
        pages = payload_of(self.part_blocks)
        for first in range(0, len(keys), self.part_blocks):
            got = target[first : first + self.part_blocks]
            if not np.array_equal(got, pages[: len(got)]):
                raise StoreRigError(f"the blocks from {first} on are not what was given")
        return elapsed_s

    def _look_up(self, keys: Sequence[bytes]) -> Lookup:
        request = pack_request(LookupRequest(keys, LIMIT_S))
        return unpack_lookup(_get(self._directory.lookup.remote(request)))

    def _release(self, found: Lookup) -> None:
        if found.lease_id is not None:
            _get(self._directory.release.remote([found.lease_id]))


def _get(answer: Any) -> Any:
    return ray.get(answer, timeout=LIMIT_S)
