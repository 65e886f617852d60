"""Less KV memory than the requests would like: everybody is served, in turn, and nobody piles up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.app_insides import wait_free
from tests.asked import SERVED, Asked
from tests.engine_driver import make_prompt
from tests.judge import Judge
from tests.running_app import Deploy, RunningApp, small_roles

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
DECODE_BLOCKS = 24
ARGS: dict[str, Any] = {
    "model": MODEL,
    "served_model_name": SERVED,
    "engine": {"dtype": "float32", "block_tokens": 32, "kv_cache_blocks": 120, "max_batch_tokens": 64},
    **small_roles(),
    "decode": {"replicas": 1, "num_cpus": 0.1, "engine": {"kv_cache_blocks": DECODE_BLOCKS}},
    "store": {"dram_gib": 0.01},  # ten mebibytes: blocks are evicted, and sometimes there is no room at all
}


@pytest.fixture
def app(deploy: Deploy) -> Iterator[RunningApp]:
    app = deploy(ARGS)
    wait_free(app)
    yield app
    wait_free(app)


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(MODEL)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def test_two_long_generations_finish_where_decode_holds_one(app: RunningApp, judge: Judge) -> None:
    preemptions = app.total("preemptions", "decode")
    prompts = [prompt(100, seed) for seed in (1, 2)]
    streams = [Asked(app.base_url, tokens, 600) for tokens in prompts]
    with ThreadPoolExecutor(2) as pool:
        judge.check(prompts, list(pool.map(Asked.answer, streams)), 600)
    assert app.total("preemptions", "decode") > preemptions


def test_while_decode_is_full_requests_wait_at_the_ingress_and_not_in_prefill(app: RunningApp, judge: Judge) -> None:
    prompts = [prompt(200, 100 + number) for number in range(16)]  # of 7 blocks each: three fit into decode
    queued, prefill_blocks = 0, 0
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [Asked(app.base_url, tokens, 200, stream=False) for tokens in prompts]
        answers = [pool.submit(asked.answer) for asked in streams]
        while not all(answer.done() for answer in answers):
            state = app.get("/debug/blocks")[1]
            queued = max(queued, state["queued_requests"])
            for worker in state["workers"]:
                if worker["role"] == "prefill":
                    prefill_blocks = max(prefill_blocks, worker["live_blocks"])
    judge.check(prompts, [answer.result() for answer in answers], 200)
    assert queued >= 8
    # What is in prefill has its place in decode; a finished one's may still be on its way out.
    assert 0 < prefill_blocks <= DECODE_BLOCKS
