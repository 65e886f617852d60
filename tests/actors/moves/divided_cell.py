"""Workers that are divided over hosts, and a store between them, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from kv.keys import block_keys
from kv.part_range import PartRange
from migrate.links.memory_network import MemoryNetwork
from migrate.moves import HeadMove, LayerMove
from tests.actors.moves.linked_worker import LinkedWorker, join
from tests.actors.moves.part_shelf import PartShelf
from tests.actors.moves.storing_worker import StoringWorker
from tests.engine_driver import make_prompt, run_prompts
from tests.link_ends import WAIT_S

PROMPTS = [make_prompt(length, length) for length in (5, 33, 90, 17, 64, 200)]


def config_of(dtype: str = "float32", blocks: int = 96, *, exports_early: bool = False) -> EngineConfig:
    more = {"early_export_bytes": 1} if exports_early else {}
    return EngineConfig(
        device="cpu", dtype=dtype, block_tokens=16, kv_cache_blocks=blocks, max_batch_tokens=40,
        max_running_requests=16, **more,
    )  # fmt: skip


class Cell:
    """A prefill and a decode worker, a host of each, and a store."""

    def __init__(self, folder: Path, network: MemoryNetwork, config: EngineConfig) -> None:
        roomy = replace(config, kv_cache_blocks=96)
        self.shelf, self.network = PartShelf(), network
        self.prefill = StoringWorker("prefill", folder, config, network, self.shelf)
        self.decode = StoringWorker("decode", folder, config, network, self.shelf)
        self.prefill_host = LinkedWorker("prefill host", folder, roomy, network)
        self.decode_host = LinkedWorker("decode host", folder, roomy, network)
        join(self.prefill, self.prefill_host)
        join(self.decode, self.decode_host)

    def host_of(self, worker: StoringWorker) -> LinkedWorker:
        return self.prefill_host if worker is self.prefill else self.decode_host

    async def move_out(self, worker: StoringWorker, first: int, count: int) -> None:
        await worker.moves.make(LayerMove(worker.name, first, count, worker.name, self.host_of(worker).name))

    async def move_back(self, worker: StoringWorker, first: int, count: int) -> None:
        await worker.moves.make(LayerMove(worker.name, first, count, self.host_of(worker).name, worker.name))

    async def move_heads_out(self, worker: StoringWorker, *layers: int) -> None:
        await worker.moves.make(HeadMove(worker.name, layers, (1,), worker.name, self.host_of(worker).name))

    async def move_heads_back(self, worker: StoringWorker, *layers: int) -> None:
        await worker.moves.make(HeadMove(worker.name, layers, (1,), self.host_of(worker).name, worker.name))

    async def answer(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The prompt on one worker, the rest on the other."""
        request = EngineRequest(name, tuple(prompt), sampling, owner=name, hand_over=True)
        first, hand_over = await self.prefill.serve(request)
        follow_up = replace(request, hand_over=False, output_token_ids=tuple(first))
        rest, _ = await self.decode.serve(follow_up, hand_over)
        return [*first, *rest]

    async def answers(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        return await asyncio.gather(
            *(self.answer(f"r{number}", prompt, sampling) for number, prompt in enumerate(prompts))
        )

    def num_checked(self, worker: StoringWorker, prompt: Sequence[int]) -> int:
        """So many of the prompt's blocks are on a worker, and have what is in the store, to the last bit."""
        loaded = worker.engine.loaded
        keys = block_keys(prompt, loaded.layout.block_tokens, loaded.fingerprint, b"")
        blocks = worker.engine.blocks.match_prefix(keys)
        if blocks:
            part = PartRange(0, len(blocks), 0, loaded.layout.num_layers, 0, loaded.layout.num_kv_heads)
            stored = np.stack([self.shelf.kv_of(key) for key in keys[: len(blocks)]])
            payload = np.empty_like(stored)
            worker.pages.read(part, blocks, payload)
            np.testing.assert_array_equal(payload, stored)
        return len(blocks)

    def stop(self) -> None:
        for worker in (self.prefill, self.decode, self.prefill_host, self.decode_host):
            worker.stop()


def run(
    folder: Path, network: MemoryNetwork, body: Callable[[Cell], Awaitable[None]], config: EngineConfig | None = None
) -> None:
    async def limited() -> None:
        cell = Cell(folder, network, config or config_of())
        try:
            async with asyncio.timeout(WAIT_S):
                await body(cell)
                for worker in (cell.prefill, cell.decode):
                    await worker.wait_free()
                    assert worker.thread.defect is None
        finally:
            cell.stop()

    asyncio.run(limited())


def alone(folder: Path, sampling: SamplingParams, dtype: str = "float32") -> list[list[int]]:
    """Answers to PROMPTS of an engine by itself."""
    config = config_of(dtype)
    return run_prompts(Engine(load_model(folder, config), config), PROMPTS, sampling)
