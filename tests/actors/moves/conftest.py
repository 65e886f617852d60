from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from migrate.links.interface import LinkSettings
from migrate.links.memory_network import MemoryNetwork
from tests.actors.moves.linked_worker import LinkedWorker
from tests.link_ends import WAIT_S
from tests.reference import FAMILIES, make_model

MakeWorker = Callable[..., LinkedWorker]


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    torch.set_num_threads(1)
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(FAMILIES[family], tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(LinkSettings(timeout_s=60.0, connect_timeout_s=WAIT_S))


@pytest.fixture
def make_worker(family_folder: Callable[[str], Path], network: MemoryNetwork) -> Iterator[MakeWorker]:
    made: list[LinkedWorker] = []

    def make(name: str, family: str = "llama", **more: object) -> LinkedWorker:
        options = {
            "dtype": "float32",
            "block_tokens": 16,
            "kv_cache_blocks": 96,
            "max_batch_tokens": 40,
            "max_running_requests": 16,
        } | more
        made.append(LinkedWorker(name, family_folder(family), EngineConfig(**options), network))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for worker in made:
        worker.stop()
