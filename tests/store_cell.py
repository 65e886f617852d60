"""A directory, node stores and stand-ins for workers on a real Ray cluster, for tests of the store.

The worker's place is taken by a small actor whose KV is a function of the block's key, so that a reader can tell by
itself what the right values are.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import ray
from numpy.typing import NDArray

from kv.directory_actor import DirectoryActor
from kv.directory_client import DirectoryClient
from kv.extents import Lookup, PullReceipt, TailReceipt
from kv.fetch import fetch_parts, fetch_tail
from kv.keys import block_keys
from kv.layout import KvLayout
from kv.node_store import NodeStore
from kv.part_range import MIN_PART_LIMIT_BYTES, PartRange
from kv.parts import PartHeader, encode_part
from kv.store_stats import StoreStats
from kv.wire import LookupRequest, pack_keys, pack_request, unpack_lookup

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float32")
"""64 KiB a block: a tail is small, and 12 blocks make a part."""
WIDE_LAYOUT = replace(LAYOUT, head_dim=256)
"""256 KiB a block: a tail is too large to be small."""
FINGERPRINT = b"model"
MIB = 1024 * 1024


def values_of(layout: KvLayout, key: bytes) -> NDArray[np.float32]:
    """KV of the block with this key: [layers, heads, 2, block_tokens, head_dim]."""
    generator = np.random.default_rng(list(key))
    shape = (layout.num_layers, layout.num_kv_heads, 2, layout.block_tokens, layout.head_dim)
    return generator.random(shape, dtype=np.float32)


class Worker:
    """Exports the KV of any chain it was told of. `defect` makes every export go wrong in one way."""

    def __init__(self, defect: str = "") -> None:
        self.defect = defect
        self.chains: dict[str, tuple[list[bytes], int, KvLayout]] = {}
        self.exported_blocks = 0
        self.opened = asyncio.Event()

    async def admit(self, export_id: str, keys: list[bytes], num_tokens: int, layout: KvLayout) -> None:
        self.chains[export_id] = (keys, num_tokens, layout)

    async def open(self) -> None:
        self.opened.set()

    async def num_exported_blocks(self) -> int:
        return self.exported_blocks

    async def export(self, export_id: str, ranges: list[PartRange]) -> list[Any]:
        if self.defect == "waits":
            await self.opened.wait()
        if self.defect == "raises":
            raise RuntimeError("the request is gone")
        if self.defect == "dies":
            os._exit(1)
        parts: list[Any] = [self.encode(export_id, part) for part in ranges]
        if self.defect == "flips a bit of the last part":
            parts[-1][parts[-1].size // 2] ^= 4
        if self.defect == "gives nothing":
            parts[0] = None
        if self.defect == "gives too few":
            parts = parts[:-1]
        self.exported_blocks += sum({part.first_block: part.num_blocks for part in ranges}.values())
        return parts

    def encode(self, export_id: str, part: PartRange) -> NDArray[np.uint8]:
        keys, num_tokens, layout = self.chains[export_id]
        chosen = tuple(keys[part.first_block : part.first_block + part.num_blocks])
        is_tail = part.first_block == len(keys)
        tokens = num_tokens % layout.block_tokens if is_tail else layout.block_tokens
        blocks = np.stack([values_of(layout, key) for key in chosen or (export_id.encode(),)])
        payload = blocks[
            :,
            part.first_layer : part.first_layer + part.num_layers,
            part.first_head : part.first_head + part.num_heads,
        ]
        return encode_part(PartHeader(layout, FINGERPRINT, part, chosen, tokens), payload)


class UnreliableStore:
    """Stands between a reader and a store, and spoils what it passes on."""

    def __init__(self, store: Any, fault: str) -> None:
        self.store = store
        self.fault = fault
        self.dropped: list[str] = []
        self.kept: list[Any] = []

    async def keep(self, part_ids: list[str]) -> None:
        self.kept = await self.store.get_parts.remote(part_ids)

    async def get_parts(self, part_ids: list[str]) -> list[Any]:
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "has lost them":
            return [None] * len(part_ids)
        if self.fault == "gives kept ones":
            return self.kept
        refs = await self.store.get_parts.remote(part_ids)
        value = await refs[-1]
        buffer = np.array(value[0] if isinstance(value, list) else value)
        buffer[buffer.size // 3] ^= 1
        return [*refs[:-1], ray.put(buffer)]

    async def drop(self, extent_ids: list[str]) -> None:
        self.dropped += extent_ids

    async def num_dropped(self) -> int:
        return len(self.dropped)


class Setup:
    """A directory and what tests make around it; everything is killed at the end of the test."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.directory = self.start(cast(Any, DirectoryActor).options(max_restarts=-1), ())

    def start(self, actor_class: Any, args: tuple[Any, ...], **kwargs: Any) -> Any:
        actor = actor_class.remote(*args, **kwargs)
        self.actors.append(actor)
        return actor

    def store(self, limit_bytes: int = 64 * MIB, store_id: str = "s", **options: Any) -> Any:
        options.setdefault("max_part_bytes", MIN_PART_LIMIT_BYTES)
        return self.start(NodeStore, (store_id, [self.directory], limit_bytes), **options)

    def worker(self, defect: str = "") -> Any:
        return self.start(ray.remote(num_cpus=0)(Worker), (defect,))

    def unreliable(self, store: Any, fault: str) -> Any:
        return self.start(ray.remote(num_cpus=0)(UnreliableStore), (store, fault))

    def directory_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = get(self.directory.stats.remote())
        return stats

    def lookup(self, keys: list[bytes], lease_s: float = 60.0, skip_blocks: int = 0) -> Lookup:
        return look_up(self.directory, keys, lease_s, skip_blocks)

    def visible(self, keys: list[bytes]) -> int:
        return visible_blocks(self.directory, keys)


def get(ref: Any) -> Any:
    return ray.get(ref, timeout=60)


def look_up(directory: Any, keys: Sequence[bytes], lease_s: float, skip_blocks: int = 0) -> Lookup:
    request = LookupRequest(keys, lease_s, skip_blocks)
    return unpack_lookup(get(directory.lookup.remote(pack_request(request))))


def visible_blocks(directory: Any, keys: Sequence[bytes]) -> int:
    num_blocks: int = get(directory.match_blocks.remote(pack_keys(keys)))
    return num_blocks


def chain(name: str, num_blocks: int, layout: KvLayout = LAYOUT) -> list[bytes]:
    return block_keys(range(num_blocks * layout.block_tokens), layout.block_tokens, FINGERPRINT, name.encode())


def start_pull(
    store: Any,
    worker: Any,
    keys: list[bytes],
    tail_tokens: int = 0,
    layout: KvLayout = LAYOUT,
    export_id: str = "request",
) -> Any:
    num_tokens = len(keys) * layout.block_tokens + tail_tokens
    get(worker.admit.remote(export_id, keys, num_tokens, layout))
    return store.pull.remote(worker, export_id, keys, num_tokens, layout, FINGERPRINT)


def pull(store: Any, worker: Any, keys: list[bytes], tail_tokens: int = 0, layout: KvLayout = LAYOUT) -> PullReceipt:
    receipt: PullReceipt = get(start_pull(store, worker, keys, tail_tokens, layout))
    return receipt


def stats_of(store: Any) -> StoreStats:
    stats: StoreStats = get(store.stats.remote())
    return stats


def fetch(
    setup: Setup, stores: dict[str, Any], keys: list[bytes], found: Lookup, timeout_s: float = 30.0
) -> tuple[int, list[str]]:
    """Fetch, compare every value, and return (blocks from the start of the request, misses)."""
    misses: list[str] = []
    end = found.num_blocks
    start = end - sum(piece.count for piece in found.slices)
    lanes: dict[int, set[tuple[int, int]]] = {block: set() for block in range(start, end)}

    def lose(label: str, num_blocks: int) -> None:
        nonlocal end
        misses.append(label)
        assert num_blocks < end
        end = num_blocks

    def complete_layers() -> int:
        """Leading layers that all blocks have which may still come."""
        return min(
            next(
                (
                    x
                    for x in range(LAYOUT.num_layers)
                    if any((x, y) not in lanes[b] for y in range(LAYOUT.num_kv_heads))
                ),
                LAYOUT.num_layers,
            )
            for b in range(start, end)
        )

    async def run() -> None:
        async for got in fetch_parts(
            directory, stores, found, keys, LAYOUT, FINGERPRINT, timeout_s=timeout_s, on_miss=lose
        ):
            where = got.part.header.range
            stop = got.first_block + got.num_blocks
            wanted = np.stack([values_of(LAYOUT, key) for key in keys[got.first_block : stop]])
            layers = range(where.first_layer, where.first_layer + where.num_layers)
            heads = range(where.first_head, where.first_head + where.num_heads)
            np.testing.assert_array_equal(
                got.part.payload[got.first : got.first + got.num_blocks],
                wanted[:, layers.start : layers.stop, heads.start : heads.stop],
            )
            for block in range(got.first_block, stop):
                lanes[block] |= {(layer, head) for layer in layers for head in heads}
            assert got.num_layers == complete_layers()

    async def run_and_release() -> None:
        try:
            await run()
        finally:
            directory.send_released()

    directory = DirectoryClient([setup.directory])
    asyncio.run(run_and_release())
    everything = LAYOUT.num_layers * LAYOUT.num_kv_heads
    assert all(len(lanes[block]) == everything for block in range(start, end))
    return end, misses


def claim(stores: dict[str, Any], tail: TailReceipt, num_tokens: int, layout: KvLayout) -> tuple[Any, list[str]]:
    misses: list[str] = []
    parts = asyncio.run(
        fetch_tail(stores, tail, num_tokens, layout, FINGERPRINT, timeout_s=30.0, on_miss=misses.append)
    )
    return parts, misses


def eventually(condition: Callable[[], bool], look_every_s: float = 0.02) -> None:
    """Wait for what happens by itself a little later."""
    deadline_s = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(look_every_s)


def crash(actor: Any, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Kills an actor that Ray starts again, and waits until it has. What happens `meanwhile` may be before its end."""

    def pid() -> int | None:
        try:
            return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=5))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None

    before = pid()
    ray.kill(actor, no_restart=False)
    meanwhile()
    eventually(lambda: pid() not in (before, None))
