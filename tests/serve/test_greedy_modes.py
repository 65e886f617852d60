"""Every family's output through the real workers, in both modes, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from actors.engine.config import EngineConfig
from actors.engine.request import SamplingParams
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowClient
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)
ENGINE = EngineConfig(device="cpu", dtype="float32", block_tokens=BLOCK, kv_cache_blocks=256, slab_pages=4)
ROLES: dict[str, dict[Role, int]] = {"monolithic": {"monolithic": 1}, "static": {"prefill": 1, "decode": 1}}
SHAPES = ("llama", "mistral", "qwen2", "qwen3", "opt")


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    return make_model(FAMILIES[family], tmp_path_factory.mktemp(family), seed=5)


@pytest.fixture(scope="module")
def cells(folder: Path, ray_cluster: None) -> Iterator[dict[str, FlowClient]]:
    with ExitStack() as stack, ThreadPoolExecutor(len(ROLES)) as pool:

        def start(roles: dict[Role, int]) -> FlowClient:
            return stack.enter_context(worker_cell(str(folder), roles, ENGINE))

        yield dict(zip(ROLES, pool.map(start, ROLES.values()), strict=True))


def computed_on_decode(cell: FlowClient) -> int:
    decoders = [m.handle.actor for m in cell.members if m.role == "decode"]  # type: ignore[attr-defined]
    return sum(stats["computed_prompt_tokens"] for stats in ray.get([a.stats.remote() for a in decoders], timeout=30))


@pytest.mark.parametrize("mode", ROLES)
def test_greedy_equals_transformers(mode: str, folder: Path, cells: dict[str, FlowClient]) -> None:
    cell, reference = cells[mode], load_reference(folder)
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    cold = cell.run(prompts, greedy(20), together=False)
    assert [answer.cached_tokens for answer in cold] == [0] * len(prompts)
    assert_greedy(reference, prompts, [answer.tokens for answer in cold])
    warm = cell.run(prompts, greedy(20), together=False)
    assert [answer.cached_tokens for answer in warm] == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert_greedy(reference, prompts, [answer.tokens for answer in warm])
    batch = [make_prompt(length, 100 + seed) for seed, length in enumerate(LENGTHS * 4)][:16]
    together = cell.run(batch, greedy(20), together=True)
    assert_greedy(reference, batch, [answer.tokens for answer in together])
    assert {answer.finish_reason for answer in cold + warm + together} == {"length"}
    assert computed_on_decode(cell) == 0


def test_seeded_sampling_is_the_same_in_both_modes_alone_and_batched(cells: dict[str, FlowClient]) -> None:
    prompts = [make_prompt(length, 300 + length) for length in (5, 16, 33, 40)]
    sampling = [
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.0, top_k=20, seed=12, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.2, min_p=0.02, seed=13, choice_index=3, ignore_eos=True),
        SamplingParams(max_tokens=24, temperature=1.0, frequency_penalty=0.7, seed=14, ignore_eos=True),
    ]
    runs = [
        [answer.tokens for answer in cells[mode].run(prompts, sampling, together=together)]
        for mode in ROLES
        for together in (False, True)
    ]
    assert all(run == runs[0] for run in runs[1:])
    assert len({tuple(tokens) for tokens in runs[0]}) == len(prompts)
