from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from load_tests.client import CompletionClient
from load_tests.steady_load import SteadyLoad
from load_tests.workloads import Workload


def test_a_load_goes_on_until_it_is_left_and_comes_again(start_server: Callable[..., Any]) -> None:
    server = start_server("--token-s", "0.001")
    load = SteadyLoad(Workload("w", 1, 8, 5), 3, seed=1, token_ids=range(100, 1000))

    async def run() -> int:
        async with CompletionClient(server.url, "tiny") as client:
            async with load.running(client):
                while len(load.requests) < 20:
                    await asyncio.sleep(0.001)
            return len(await load.once_more(client))

    assert asyncio.run(run()) == len(load.records) == len(load.requests) >= 20
    assert all(record.succeeded and len(record.chunk_s) == 5 for record in load.records)
    seen = server.seen()
    sent = [tuple(body["prompt"]) for body in seen["bodies"]]
    half = len(load.requests)
    assert sorted(sent[:half]) == sorted(sent[half:]) == sorted(load.prompts)
    assert len(set(load.prompts)) == half
    assert seen["peak_in_flight"] == 3


def test_who_leaves_by_an_error_leaves_nothing_running(start_server: Callable[..., Any]) -> None:
    server = start_server("--first-token-s", "60")
    load = SteadyLoad(Workload("w", 1, 8, 5), 2, seed=1, token_ids=range(100, 1000))

    async def run() -> None:
        async with CompletionClient(server.url, "tiny") as client, load.running(client):
            raise LookupError("something else is wrong")

    with pytest.raises(LookupError, match="something else"):
        asyncio.run(run())
