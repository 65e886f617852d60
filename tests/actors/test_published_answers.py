"""The next turn of a chat finds the last answer in the store, whichever worker gets it (real workers, no Serve)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from actors.engine.config import EngineConfig
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.reference import FAMILIES, assert_greedy, load_reference, make_model
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

BLOCK = 16
ENGINE = EngineConfig(dtype="float32", block_tokens=BLOCK, kv_cache_blocks=40, max_batch_tokens=128)
ROLES: dict[Role, int] = {"prefill": 2, "decode": 1}
TURNS = [(40, 24), (20, 13), (20, 12), (16, 1), (5, 60)]
"""Tokens of prompt and answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cell(ray_cluster: None, folder: Path) -> Iterator[FlowClient]:
    with worker_cell(str(folder), ROLES, ENGINE) as cell:
        yield cell


def over_prefill_worker(cell: FlowClient, number: int) -> FlowClient:
    prefill = [member for member in cell.members if member.role == "prefill"]
    return replace(cell, members=(prefill[number], *(m for m in cell.members if m.role == "decode")))


def ask(cell: FlowClient, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[FlowAnswer]:
    answers = cell.run(prompts, [greedy(length) for length in lengths], together=True)
    assert [len(answer.tokens) for answer in answers] == list(lengths)
    return answers


def test_the_next_turn_finds_prompt_and_answer_on_any_prefill_worker(cell: FlowClient, folder: Path) -> None:
    first = [make_prompt(prompt, seed) for seed, (prompt, _) in enumerate(TURNS)]
    answers = ask(over_prefill_worker(cell, 0), first, [answer for _, answer in TURNS])
    cell.wait_free()
    reference = load_reference(folder)
    assert_greedy(reference, first, [answer.tokens for answer in answers])
    # The KV of a turn's last token is computed with the next turn.
    for number, new_tokens, missing in ((1, 7, 1), (0, 30, 0)):
        second = [
            (*prompt, *answer.tokens, *make_prompt(new_tokens, seed))
            for seed, (prompt, answer) in enumerate(zip(first, answers, strict=True))
        ]
        again = ask(over_prefill_worker(cell, number), second, [5] * len(second))
        known = [(prompt + answer - missing) // BLOCK * BLOCK for prompt, answer in TURNS]
        assert [answer.cached_tokens for answer in again] == known
        assert_greedy(reference, second, [answer.tokens for answer in again])
    cell.wait_free()


def test_decode_workers_publish_only_what_the_store_has_not(cell: FlowClient) -> None:
    prompt = make_prompt(3 * BLOCK + 4, 50)
    before = sum(each["published_answer_blocks"] for each in cell.stats("decode"))
    for _ in range(2):  # the second time everything is there
        ask(cell, [prompt], [2 * BLOCK])
        cell.wait_free()
        assert sum(each["published_answer_blocks"] for each in cell.stats("decode")) == before + 2


def test_answers_beyond_the_pool_are_all_right_and_leave_no_block(cell: FlowClient, folder: Path) -> None:
    prompts = [make_prompt(50 + seed, 100 + seed) for seed in range(24)]
    answers = ask(cell, prompts, [100] * len(prompts))
    cell.wait_free()
    assert_greedy(load_reference(folder), prompts, [answer.tokens for answer in answers])
    assert ray.get(cell.directory.stats.remote(), timeout=30)["num_puts"] == 0


def test_a_store_that_is_full_and_then_dead_changes_nothing_for_clients(ray_cluster: None, folder: Path) -> None:
    roles: dict[Role, int] = {"prefill": 1, "decode": 1}
    prompts = [make_prompt(40 + seed, seed) for seed in range(8)]
    with worker_cell(str(folder), roles, ENGINE, store_bytes=0) as cell:
        full = ask(cell, prompts[:4], [40] * 4)
        cell.wait_free()
        ray.kill(cell.store)
        dead = ask(cell, prompts[4:], [40] * 4)
        cell.wait_free()
        assert_greedy(load_reference(folder), prompts, [answer.tokens for answer in full + dead])
        (decode,) = cell.stats("decode")
        assert (decode["published_answer_blocks"], decode["unpublished_answers"]) == (0, len(prompts))
