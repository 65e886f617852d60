"""Fetches into pages of a device that copies only what somebody waits for."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.loading import LoadedModel, load_model
from actors.engine.request import EngineRequest
from actors.engine.staging import StagedCopies
from actors.fetch_rates import FetchRates
from actors.found_prefix import FoundPrefix
from actors.kv_exchange import KvExchange
from actors.kv_pages import LocalPages
from actors.page_writer import PageWriter
from kv.part_range import PartRange
from load_tests.deferred_streams import DeferredStreams
from tests.engine_driver import greedy
from tests.plain_store import BLOCK, PROMPT, PlainStore
from tests.reference import FAMILIES, make_model

BLOCKS = [4, 9, 2]
REQUEST = EngineRequest("r", PROMPT, greedy(4))


class Lazy(random.Random):
    """The device does nothing that nobody waits for."""

    def random(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=32)
    plain = load_model(make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model")), config)
    pages = plain.arena.page_words
    copies = StagedCopies(pages, DeferredStreams(Lazy()), num_slots=2, slot_bytes=3 * plain.layout.page_bytes)
    return replace(plain, copies=copies)


def numbers_in(loaded: LoadedModel, block_ids: list[int]) -> set[float]:
    """What the pages hold now, without asking the device to get on."""
    lanes = range(loaded.layout.num_layers)
    return {float(x) for layer in lanes for x in loaded.arena.pages[loaded.lanes.pages(layer)[:, block_ids]].unique()}


def test_the_pages_are_filled_when_a_fetch_has_ended(loaded: LoadedModel) -> None:
    async def body() -> None:
        store = PlainStore(loaded, ("dram", "dram", "dram"))
        rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
        exchange = KvExchange(loaded, rates, lease_s=30.0, fetch_timeout_s=60.0, publish_timeout_s=60.0)
        exchange.use_store(store.address())
        found = await exchange.find(REQUEST, None)
        assert isinstance(found, FoundPrefix)
        assert await exchange.fetch(found, [*BLOCKS, 7], 0, None, loaded.copies.mark) == 3 * BLOCK

    asyncio.run(body())
    assert [numbers_in(loaded, [block]) for block in BLOCKS] == [{1.5}, {2.5}, {3.5}]


@pytest.mark.parametrize("times", [1, 3])
def test_a_writer_that_is_cancelled_has_nothing_on_its_way_once_it_has_finished(
    times: int, loaded: LoadedModel
) -> None:
    layout = loaded.layout
    part = PartRange(0, 3, 0, layout.num_layers, 0, layout.num_kv_heads)
    payload = np.full(part.shape(layout), 10.0 + times, np.float32)
    writer = PageWriter(LocalPages(loaded), loaded.copies.mark)

    async def fetch() -> None:
        try:
            await writer.write(part, BLOCKS, payload)
        finally:
            await writer.finish()

    async def body() -> None:
        fetching = asyncio.create_task(fetch())
        await asyncio.sleep(0)
        for _ in range(times):
            fetching.cancel()
            await asyncio.sleep(0)
        await asyncio.wait({fetching})
        assert fetching.cancelled()

    asyncio.run(body())
    assert numbers_in(loaded, BLOCKS) == {10.0 + times}


def test_a_part_may_be_on_its_way_until_its_event(loaded: LoadedModel) -> None:
    """Nobody waits for the device between two parts."""
    layout = loaded.layout
    part = PartRange(0, 1, 0, layout.num_layers, 0, 1)
    block = [11]

    async def body() -> None:
        writer = PageWriter(LocalPages(loaded), loaded.copies.mark)
        copied = await writer.write(part, block, np.full(part.shape(layout), 8.0, np.float32))
        assert copied is not None
        assert numbers_in(loaded, block) == {0.0}
        await writer.finish()
        assert numbers_in(loaded, block) == {0.0, 8.0}

    asyncio.run(body())
