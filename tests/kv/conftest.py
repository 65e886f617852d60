from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from tests.store_cell import Setup, Worker


@pytest.fixture(scope="module")
def worker(ray_cluster: None) -> Iterator[Any]:
    """A worker without defects, for all tests that do not kill it."""
    actor: Any = ray.remote(num_cpus=0)(Worker).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
def setup() -> Iterator[Setup]:
    """A directory, and what the test makes around it."""
    made = Setup()
    yield made
    for actor in made.actors:
        ray.kill(actor)
