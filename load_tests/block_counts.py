"""The server's own count of its KV blocks, read over HTTP.

The server answers `{"workers": [{"worker_id", "role", "total_blocks", "free_blocks", "live_blocks"}]}`. Live blocks are
held by requests that have not ended; blocks that are neither live nor free hold cached prefixes and can be evicted.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from load_tests.driver import clock_s

_ASK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerBlocks:
    worker_id: str
    role: str
    total_blocks: int
    free_blocks: int
    live_blocks: int


@dataclass(frozen=True, slots=True)
class BlocksAtEnd:
    """How the blocks stood when all were free, or when the time for that was up."""

    all_free: bool
    waited_s: float
    workers: tuple[WorkerBlocks, ...]


def parse_blocks(answer: Any) -> tuple[WorkerBlocks, ...]:
    """Raises ValueError when the answer does not have the form above, or holds counts that cannot be."""
    try:
        workers = tuple(
            WorkerBlocks(
                str(entry["worker_id"]),
                str(entry["role"]),
                int(entry["total_blocks"]),
                int(entry["free_blocks"]),
                int(entry["live_blocks"]),
            )
            for entry in answer["workers"]
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no block counts: {str(answer)[:200]} ({type(error).__name__}: {error})") from error
    if not workers:
        raise ValueError("the block counts name no worker")
    for worker in workers:
        if min(worker.free_blocks, worker.live_blocks) < 0 or (
            worker.free_blocks + worker.live_blocks > worker.total_blocks
        ):
            raise ValueError(f"impossible block counts: {worker}")
    return workers


async def read_blocks(session: aiohttp.ClientSession, url: str) -> tuple[WorkerBlocks, ...]:
    """Raises ValueError when the counts cannot be had."""
    try:
        async with session.get(url, raise_for_status=True) as response:
            return parse_blocks(await response.json(content_type=None))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ValueError(f"GET {url} gave no block counts ({type(error).__name__}: {error})") from error


async def wait_until_free(session: aiohttp.ClientSession, url: str, limit_s: float) -> BlocksAtEnd:
    """Asks until no block is live, for `limit_s` at most. Raises ValueError when the counts cannot be had."""
    start_s = clock_s()
    while True:
        workers = await read_blocks(session, url)
        waited_s = clock_s() - start_s
        all_free = all(worker.live_blocks == 0 for worker in workers)
        if all_free or waited_s >= limit_s:
            return BlocksAtEnd(all_free, waited_s, workers)
        await asyncio.sleep(min(_ASK_EVERY_S, limit_s - waited_s))
