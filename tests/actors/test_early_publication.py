"""Long prompts go to the store while they are computed (real workers, directory and store; no Serve)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.engine.config import EngineConfig
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowClient
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model
from tests.running_app import wait_until
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
ENGINE = EngineConfig(
    dtype="float32", block_tokens=BLOCK, kv_cache_blocks=96, max_batch_tokens=64, early_export_bytes=1
)  # fmt: skip
LENGTHS = (63, 64, 65, 130, 150, 200, 257, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cell(ray_cluster: None, folder: Path) -> Iterator[FlowClient]:
    roles: dict[Role, int] = {"prefill": 1, "decode": 1}
    with worker_cell(str(folder), roles, ENGINE) as cell:
        yield cell


def test_chunks_are_published_while_the_next_ones_are_computed(cell: FlowClient, folder: Path) -> None:
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    cold = cell.run(prompts, greedy(6), together=True)
    cell.wait_free()
    assert cell.stats("prefill")[0]["early_published_blocks"] >= 4
    assert cell.stats("decode")[0]["computed_prompt_tokens"] == 0
    assert_greedy(load_reference(folder), prompts, [answer.tokens for answer in cold])
    again = cell.run(prompts, greedy(6), together=True)
    assert [answer.cached_tokens for answer in again] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert [answer.tokens for answer in again] == [answer.tokens for answer in cold]
    cell.wait_free()

    def is_anything_held() -> bool:
        directory = ray.get(cell.directory.stats.remote(), timeout=30)
        return bool(directory["num_puts"] or directory["num_leases"])

    wait_until(lambda: not is_anything_held(), 10.0, "the directory holds something for a request that is gone")


def test_a_prompt_that_is_mostly_there_gives_only_the_rest(cell: FlowClient) -> None:
    prompt = make_prompt(200, 77)
    cell.run([prompt], greedy(2), together=True)
    cell.wait_free()
    before = cell.stats("prefill")[0]["early_published_blocks"]
    longer = (*prompt, *make_prompt(130, 78))
    cell.run([longer], greedy(2), together=True)
    cell.wait_free()
    new_blocks = len(longer) // BLOCK - len(prompt) // BLOCK
    assert 0 < cell.stats("prefill")[0]["early_published_blocks"] - before <= new_blocks
