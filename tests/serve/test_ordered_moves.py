"""Moves in the running app, as its control deployment orders them, while it answers over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray

from actors.addresses import address_of
from migrate.move_report import MoveFailedError
from migrate.moves import LayerMove
from tests.app_insides import wait_free
from tests.asked import SERVED, Answered, Asked
from tests.engine_driver import make_prompt
from tests.judge import Judge
from tests.ordered_moves import order, state_of
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
ARGS: dict[str, Any] = {
    "mode": "balanced",
    "model": MODEL,
    "served_model_name": SERVED,
    "engine": {
        "dtype": "float32", "block_tokens": 32, "kv_cache_blocks": 256, "max_batch_tokens": 64,
        "max_context_tokens": 2048,
    },
    "store": {"share_prefixes": False},
    "moves": {"automatic": False},
    **small_roles(),
}  # fmt: skip
ANSWER = 600
LIMIT_S = 120.0


@pytest.fixture
def app(deploy: Deploy) -> Iterator[RunningApp]:
    app = deploy(ARGS)
    yield app
    wait_free(app, 30.0)


def ends(app: RunningApp) -> tuple[str, str]:
    return app.members("decode")[0].worker_id, app.members("prefill")[0].worker_id


def begin(app: RunningApp) -> tuple[list[tuple[int, ...]], list[Asked], list[list[str]]]:
    """Streams that the decode worker is at."""
    prompts = [make_prompt(50, seed, vocab=250) for seed in range(4)]
    streams = [Asked(app.base_url, prompt, ANSWER) for prompt in prompts]
    return prompts, streams, [asked.wait_tokens(20) for asked in streams]


def rest(streams: list[Asked], begun: list[list[str]]) -> list[Answered]:
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = list(pool.map(Asked.answer, streams))
    for answered, tokens in zip(answers, begun, strict=True):
        answered.tokens[:0] = tokens
    return answers


def test_layers_move_to_the_prefill_worker_and_home_again(app: RunningApp) -> None:
    decode, prefill = ends(app)
    prompts, streams, begun = begin(app)
    order(LayerMove(decode, 4, 4, decode, prefill))
    assert state_of(decode).placement.layers_on(prefill) == (4, 5, 6, 7)
    assert [part.instance for part in state_of(prefill).hosted] == [decode]
    for tokens, asked in zip(begun, streams, strict=True):
        tokens += asked.wait_tokens(20)
    order(LayerMove(decode, 4, 4, prefill, decode))
    Judge(MODEL).check(prompts, rest(streams, begun), ANSWER)
    assert state_of(decode).placement.is_home
    assert state_of(prefill).hosted == ()
    with pytest.raises(MoveFailedError, match="is not a worker that is alive"):
        order(LayerMove(decode, 4, 4, decode, "nobody"))


def test_streams_go_on_when_the_host_of_their_layers_dies(app: RunningApp) -> None:
    decode, prefill = ends(app)
    prompts, streams, begun = begin(app)
    order(LayerMove(decode, 4, 4, decode, prefill))
    ray.kill(address_of(app.members("prefill")[0]).actor)
    Judge(MODEL).check(prompts, rest(streams, begun), ANSWER)

    def is_replaced() -> bool:
        members = app.members("prefill")
        return len(members) == 1 and members[0].worker_id != prefill and app.get("/health")[0] == 200

    wait_until(is_replaced, LIMIT_S, "the prefill worker is not replaced")
    state = state_of(decode)
    assert (state.placement.is_home, state.repairs) == (True, 1)
    decode, prefill = ends(app)
    order(LayerMove(decode, 4, 4, decode, prefill))
    order(LayerMove(decode, 4, 4, prefill, decode))
