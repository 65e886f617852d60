"""`store.share_prefixes: false`: prefill workers have only what they computed themselves, and hand over as ever (real
workers, no Serve)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from actors.engine.config import EngineConfig
from actors.model_source import resolve_model
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.flow_client import FlowAnswer, FlowClient
from tests.reference import assert_greedy, load_reference
from tests.worker_cell import worker_cell

pytestmark = pytest.mark.cluster

MODEL = "random/llama-4x8x2"
BLOCK = 16
ENGINE = EngineConfig(dtype="float32", block_tokens=BLOCK, kv_cache_blocks=100, max_batch_tokens=64)
ROLES: dict[Role, int] = {"prefill": 2, "decode": 1}
ANSWER = 40


@pytest.fixture(scope="module")
def cell(ray_cluster: None) -> Iterator[FlowClient]:
    with worker_cell(MODEL, ROLES, ENGINE, share_prefixes=False) as client:
        yield client


def ask(cell: FlowClient, worker: int, prompts: Sequence[tuple[int, ...]]) -> list[FlowAnswer]:
    """Of one prefill worker; right answers. On return nothing is held any more."""
    prefill = [member for member in cell.members if member.role == "prefill"]
    decode = [member for member in cell.members if member.role == "decode"]
    answers = replace(cell, members=(prefill[worker], *decode)).run(prompts, greedy(ANSWER), together=True)
    assert_greedy(load_reference(resolve_model(MODEL).path), prompts, [answer.tokens for answer in answers])

    cell.wait_free()
    return answers


def test_every_prefill_worker_computes_a_prompt_itself_and_decode_computes_none(cell: FlowClient) -> None:
    prompts = [make_prompt(length, seed=length, vocab=250) for length in (BLOCK + 1, 4 * BLOCK, 9 * BLOCK + 5)]
    in_full_blocks = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]
    for worker in (0, 1):
        assert [answer.cached_tokens for answer in ask(cell, worker, prompts)] == [0, 0, 0]
    # What a worker has computed it finds in its own pool.
    assert [answer.cached_tokens for answer in ask(cell, 1, prompts)] == in_full_blocks
    computed = [each["computed_prompt_tokens"] for each in cell.stats("prefill")]
    assert computed == [sum(map(len, prompts)), 2 * sum(map(len, prompts)) - sum(in_full_blocks)]
    assert [each["fetched_tokens"] for each in cell.stats("prefill")] == [0, 0]
    (decode,) = cell.stats("decode")
    assert (decode["computed_prompt_tokens"], decode["recomputed_tokens"]) == (0, 0)
    assert decode["fetched_tokens"] > 0
    assert all(each["store_misses"] == {} for each in cell.stats())


def test_an_answer_is_not_stored_and_the_next_turn_computes_it(cell: FlowClient) -> None:
    first = make_prompt(2 * BLOCK, seed=7, vocab=250)
    (answer,) = ask(cell, 0, [first])
    (decode,) = cell.stats("decode")
    assert (decode["published_answer_blocks"], decode["unpublished_answers"]) == (0, 0)
    (again,) = ask(cell, 0, [(*first, *answer.tokens, 5)])
    assert again.cached_tokens == 2 * BLOCK
