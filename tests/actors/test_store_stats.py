"""What the control deployment says of a node's store while that is being started again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest
import ray

from actors.control import stats_of_store
from kv.node_store import NodeStore
from kv.store_stats import StoreStats
from tests.store_cell import MIB, Setup, eventually, stats_of

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def store() -> Iterator[Any]:
    setup = Setup()
    yield setup.start(cast(Any, NodeStore).options(max_restarts=-1), ("s", [setup.directory], MIB))
    for actor in setup.actors:
        ray.kill(actor)


def test_a_store_that_crashed_is_restarting_until_it_is_there_again(store: Any) -> None:
    stats_of(store)
    ray.kill(store, no_restart=False)
    eventually(lambda: asyncio.run(stats_of_store(store)) == "restarting")
    eventually(lambda: isinstance(asyncio.run(stats_of_store(store)), StoreStats))


def test_one_that_is_gone_for_good_is_no_error(store: Any) -> None:
    stats_of(store)
    ray.kill(store)
    eventually(lambda: asyncio.run(stats_of_store(store)) == "restarting")
