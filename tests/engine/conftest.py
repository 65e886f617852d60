from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine
from actors.engine.loading import load_model
from tests.reference import FAMILIES, make_model

torch.set_num_threads(1)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of every family, on disk."""
    root = tmp_path_factory.mktemp("families")
    return {name: make_model(config, root / name, seed) for seed, (name, config) in enumerate(FAMILIES.items())}


@pytest.fixture(scope="session")
def llama_folder(family_folders: dict[str, Path]) -> Path:
    return family_folders["llama"]


@pytest.fixture(scope="session")
def make_engine() -> MakeEngine:
    """Engines over a folder, float32 on the CPU unless told otherwise."""

    def make(folder: Path, **settings: object) -> Engine:
        settings = {"device": "cpu", "dtype": "float32", "kv_cache_blocks": 256, "slab_pages": 4} | settings
        if "kv_cache_bytes" in settings:
            del settings["kv_cache_blocks"]
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        return Engine(load_model(folder, config), config)

    return make
