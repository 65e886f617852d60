"""The DRAM tier of a node's store: objects in the node's object store that the store's actor owns, within a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeAlias

from kv.directory_client import DirectoryClient
from kv.extents import Copy, ExtentInfo
from kv.store_ledger import StoreLedger

Demote: TypeAlias = Callable[[ExtentInfo, Sequence[Any]], Awaitable[None]]
"""Given an extent that makes room for others, and its references; it goes when this returns."""


class DramTier:
    """Makes room by the directory's word; what it holds can be read by its references. Used from one event loop.

    Args:
        limit_bytes: it never holds more.
        demote: told of every extent that makes room for others, before it goes.
    """

    def __init__(self, store_id: str, directory: DirectoryClient, limit_bytes: int, demote: Demote) -> None:
        self.ledger = StoreLedger(limit_bytes)
        self._store_id = store_id
        self._directory = directory
        self._demote = demote
        self._making_room = asyncio.Lock()

    async def reserve(self, num_bytes: int) -> bool:
        """Takes bytes of the limit, for which others go if need be; False when they cannot be had. Raises what the
        directory does."""
        async with self._making_room:
            shortage = self.ledger.shortage(num_bytes)
            if shortage > 0:
                evicted = await self._directory.evict(self._store_id, "dram", shortage)
                await self._let_go(evicted or await self._orphans())
            return self.ledger.reserve(num_bytes)

    async def set_limit(self, limit_bytes: int) -> None:
        """Another limit from now on; see `trim`."""
        self.ledger.limit_bytes = limit_bytes
        await self.trim()

    async def trim(self) -> None:
        """What is more than a lowered limit goes, as far as nobody holds it; the rest at a later call."""
        async with self._making_room:
            shortage = self.ledger.shortage(0)
            if shortage > 0:
                await self._let_go(await self._directory.shrink(self._store_id, "dram", shortage))

    def drop(self, extent_ids: Iterable[str]) -> None:
        """Frees extents that the directory no longer lists here. Those that are not here are no error."""
        for extent_id in extent_ids:
            self.ledger.remove_extent(extent_id)

    def bytes_of_parts(self, extent_id: str, count: int) -> int:
        """What so many parts of an extent that is here take, if all of them are equally large."""
        info = self.ledger.extent(extent_id)
        return 0 if info is None else info.num_bytes * count // len(info.lanes)

    def copies(self) -> list[Copy]:
        """What the directory was told of."""
        return [
            Copy(info, "dram", info.num_bytes)
            for info in map(self.ledger.extent, self.ledger.published())
            if info is not None
        ]

    async def _let_go(self, extent_ids: Sequence[str]) -> None:
        for extent_id in extent_ids:
            info = self.ledger.extent(extent_id)
            if info is not None:
                await self._demote(info, self.ledger.refs(extent_id))
            self.ledger.remove_extent(extent_id)

    async def _orphans(self) -> list[str]:
        """Extents that the directory lists no more: it was restarted, or a message was lost. Only we can free them."""
        published = self.ledger.published()
        listed = set(await self._directory.extent_ids_of(self._store_id, "dram"))
        return [extent_id for extent_id in published if extent_id not in listed]
