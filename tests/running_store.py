"""A directory and a store with a disk tier for one test after the other, and what can be seen of them from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import ray

from kv.disk.settings import DiskSettings
from kv.node_store import NodeStore
from kv.policy.admission import DiskAdmission
from kv.store_stats import DiskStats, StoreStats
from kv.wire import pack_keys
from tests.store_cell import MIB, Setup, get, stats_of

DRAM_BYTES, DISK_BYTES = MIB, 2 * MIB
"""Limits that the store is made with."""


class RunningStore:
    """Who leaves it empty lets the next one have it, since processes start slowly; else that one gets new actors and a
    new folder below `parent`. They are started again however often they crash."""

    def __init__(self, parent: Path, admission: DiskAdmission) -> None:
        self._parent = parent
        self._admission = admission
        self._num_starts = 0
        self._actors: list[Any] = []
        self.is_empty = False

    def start(self) -> None:
        if not self.is_empty:
            self.stop()
            self._num_starts += 1
            self.folder = self._parent / str(self._num_starts)
            self.setup = Setup()
            self._actors = self.setup.actors
            self.directory = self.setup.directory
            self.store = self.setup.start(
                cast(Any, NodeStore).options(max_restarts=-1),
                ("s", [self.directory], DRAM_BYTES),
                disk=DiskSettings(str(self.folder), DISK_BYTES, self._admission),
                pull_timeout_s=2.0,
                settle_timeout_s=0.1,
                tail_ttl_s=600.0,
            )
        get(self.store.set_limits.remote(DRAM_BYTES, DISK_BYTES))
        self.is_empty = False

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)

    def stats(self) -> tuple[StoreStats, DiskStats]:
        stats = stats_of(self.store)
        assert stats.disk is not None
        return stats, stats.disk

    def files(self) -> dict[Path, int]:
        """Bytes on disk of everything in the folder, unfinished files included, but its marker."""
        found = {}
        for path in sorted(self.folder.glob("??/*")):
            try:
                found[path] = -(-path.stat().st_size // 4096) * 4096
            except FileNotFoundError:
                continue
        return found

    def in_dram(self) -> set[str]:
        """Extents that the ledger has."""
        return set(get(self.store.__ray_call__.remote(lambda store: list(store._dram.ledger._extents))))

    def on_disk(self) -> dict[str, int]:
        """Bytes of extents by the names of their files."""
        return {extent_at(path): num_bytes for path, num_bytes in self.files().items()}

    def listed(self) -> tuple[set[str], set[str]]:
        """Extents in DRAM and on disk, by the directory's word."""
        in_dram, on_disk = get([self.directory.extent_ids_of.remote("s", tier) for tier in ("dram", "disk")])
        return set(in_dram), set(on_disk)

    def listed_bytes(self) -> tuple[int, int]:
        """In DRAM and on disk, by the directory's word."""
        by_tier = self.setup.directory_stats()["bytes_by_store"].get("s", {})
        return by_tier.get("dram", 0), by_tier.get("disk", 0)

    def visible(self, keys: set[bytes]) -> set[bytes]:
        """Those of the blocks that the directory lists."""
        asked = sorted(keys)
        found = get([self.directory.match_blocks.remote(pack_keys([key])) for key in asked])
        return {key for key, num_blocks in zip(asked, found, strict=True) if num_blocks}


def extent_at(path: Path) -> str:
    """The extent whose file this is."""
    return f"s/{path.stem}"
