"""Workers that do both parts share one store: what one has computed or answered, another finds (real workers)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.engine.config import EngineConfig
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
ENGINE = EngineConfig(
    dtype="float32", block_tokens=BLOCK, kv_cache_blocks=60, max_batch_tokens=64, early_export_bytes=1
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cell(ray_cluster: None, folder: Path) -> Iterator[FlowClient]:
    with worker_cell(str(folder), {"monolithic": 2}, ENGINE) as cell:
        yield cell


def ask(cell: FlowClient, worker: int, *prompts: tuple[int, ...], max_tokens: int) -> list[FlowAnswer]:
    return replace(cell, members=(cell.members[worker],)).run(prompts, greedy(max_tokens), together=True)


def test_prompts_and_answers_are_found_by_the_other_worker(cell: FlowClient, folder: Path) -> None:
    prompts = [make_prompt(length, length) for length in (15, 16, 17, 63, 64, 65, 150, 200)]
    first = ask(cell, 0, *prompts, max_tokens=21)
    cell.wait_free()
    chats = [
        (*prompt, *answer.tokens, *make_prompt(9, 1)) for prompt, answer in zip(prompts, first, strict=True)
    ]  # fmt: skip
    second = ask(cell, 1, *chats, max_tokens=4)
    cell.wait_free()
    # The KV of an answer's last token was not computed.
    assert [answer.cached_tokens for answer in second] == [(len(prompt) + 20) // BLOCK * BLOCK for prompt in prompts]
    reference = load_reference(folder)
    assert_greedy(reference, prompts, [answer.tokens for answer in first])
    assert_greedy(reference, chats, [answer.tokens for answer in second])


def test_a_prompt_is_found_before_its_answer_has_ended(cell: FlowClient) -> None:
    """Nothing is published at this answer's end, since it fills no block: what is found was given away before."""
    before = [each["early_published_blocks"] for each in cell.stats()]
    prompt = make_prompt(3 * BLOCK + 3, 300)
    ask(cell, 1, prompt, max_tokens=2)
    cell.wait_free()
    assert [each["early_published_blocks"] for each in cell.stats()] == [before[0], before[1] + 3]
    (answer,) = ask(cell, 0, prompt, max_tokens=2)
    assert answer.cached_tokens == 3 * BLOCK
    cell.wait_free()


def test_workers_that_share_nothing_need_no_store(ray_cluster: None, folder: Path) -> None:
    prompt = make_prompt(70, 5)
    with worker_cell(str(folder), {"monolithic": 2}, ENGINE, share_prefixes=False) as cell:
        assert cell.store is None
        answers = [ask(cell, worker, prompt, max_tokens=4)[0] for worker in (0, 1, 1)]
        assert [answer.cached_tokens for answer in answers] == [0, 0, 4 * BLOCK]
        assert_greedy(load_reference(folder), [prompt] * 3, [answer.tokens for answer in answers])
