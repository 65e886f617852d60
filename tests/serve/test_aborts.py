"""Clients that go away: wherever their requests are, everything is free at once and the next one is served as ever."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.app_insides import held, reported, stopped, store_process, wait_free
from tests.asked import SERVED, Asked, ask
from tests.engine_driver import make_prompt
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

MAX_INFLIGHT = 24
ARGS: dict[str, Any] = {
    "model": "random/llama-8x8",
    "served_model_name": SERVED,
    "engine": {
        "dtype": "float32", "block_tokens": 32, "kv_cache_blocks": 384, "max_batch_tokens": 64,
    },
    **small_roles(),
    "ingress": {"num_cpus": 0.1, "max_inflight_requests": MAX_INFLIGHT, "max_queued_requests": 400},
}  # fmt: skip
"""Blocks of 128 KiB, so that tails are objects too; a step computes so little that a long prompt takes a while."""


@pytest.fixture
def app(deploy: Deploy) -> RunningApp:
    app = deploy(ARGS)
    wait_free(app)
    return app


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def assert_answers(app: RunningApp, seed: int) -> None:
    answered = ask(app.base_url, prompt(200, seed), 16)
    assert (answered.status, len(answered.tokens), answered.finish_reason) == (200, 16, "length")


def test_two_hundred_requests_all_aborted_leave_nothing_behind(app: RunningApp) -> None:
    assert_answers(app, 98)
    members = app.members()
    rng = random.Random(12)
    open_: list[Asked] = []
    for number in range(200):
        length = rng.choice([5, 31, 32, 33, 100, 500, 1500])
        # Every second one begins as others do: there is KV to find, to lease and to fetch.
        prefix = prompt(96, 7) if number % 2 else ()
        stream = rng.random() < 0.6
        asked = Asked(app.base_url, (*prefix, *prompt(length, number)), rng.choice([1, 20, 400]), stream=stream)
        open_.append(asked)
        if stream and rng.random() < 0.2:
            asked.wait_tokens(rng.choice([1, 1, 5, 30]))
        time.sleep(rng.random() * 0.02)
        while len(open_) > 40 or (open_ and rng.random() < 0.3):
            open_.pop(rng.randrange(len(open_))).leave()
    for asked in open_:
        asked.leave()
    wait_free(app)
    assert_answers(app, 99)
    assert app.get("/health")[0] == 200
    assert app.members() == members


def is_queued_at_the_ingress(app: RunningApp) -> bool:
    return bool(app.get("/debug/blocks")[1]["queued_requests"] == 1)


def is_in_prefill(app: RunningApp) -> bool:
    return reported(app, "prefill", "running_requests") == 1 and reported(app, "decode", "live_blocks") == 0


def is_in_decode(app: RunningApp) -> bool:
    return reported(app, "decode", "running_requests") == 1 and reported(app, "prefill", "live_blocks") == 0


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
@pytest.mark.parametrize(
    ("length", "max_tokens", "is_there"),
    [(3500, 100, is_in_prefill), (40, 3000, is_in_decode)],
    ids=["prefill", "decode"],
)
def test_a_client_that_leaves_frees_its_request_in(
    app: RunningApp, length: int, max_tokens: int, is_there: Callable[[RunningApp], bool], stream: bool
) -> None:
    asked = Asked(app.base_url, prompt(length, random.randrange(10**6)), max_tokens, stream=stream)
    wait_until(lambda: is_there(app), 30.0, "the request did not get there")
    asked.leave()
    wait_free(app)


def test_a_client_that_leaves_in_mid_stream_frees_its_request(app: RunningApp) -> None:
    asked = Asked(app.base_url, prompt(40, 1), 3000)
    assert len(asked.wait_tokens(10)) >= 10
    assert held(app)["inflight"] == 1
    asked.leave()
    wait_free(app)


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_the_ingress_queue_is_forgotten_there(app: RunningApp, stream: bool) -> None:
    running = [Asked(app.base_url, prompt(40, seed), 3000) for seed in range(MAX_INFLIGHT)]
    for asked in running:
        asked.wait_tokens(1)
    prompt_tokens = app.total("prompt_tokens", "prefill")
    waiting = Asked(app.base_url, prompt(40, 1000), 16, stream=stream)
    wait_until(lambda: is_queued_at_the_ingress(app), 30.0, "the request did not queue")
    waiting.leave()
    wait_until(lambda: not is_queued_at_the_ingress(app), 30.0, "the request is still queued")
    for asked in running:
        asked.leave()
    wait_free(app)
    assert app.total("prompt_tokens", "prefill") == prompt_tokens


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_client_that_leaves_during_the_hand_over_frees_both_sides(app: RunningApp, stream: bool) -> None:
    with stopped(store_process()):  # the store takes the KV when it goes on: until then this is the hand-over
        asked = Asked(app.base_url, prompt(100, random.randrange(10**6)), 50, stream=stream)
        wait_until(
            lambda: reported(app, "prefill", "live_blocks") == 4 and not reported(app, "prefill", "running_requests"),
            30.0,
            "the request did not get there",
        )
        asked.leave()
        wait_until(lambda: app.get("/debug/blocks")[1]["inflight_requests"] == 0, 30.0, "the ingress still has it")
    wait_free(app)


def test_all_choices_of_a_request_are_freed_together(app: RunningApp) -> None:
    asked = Asked(app.base_url, prompt(100, 3), 2000, n=4)
    seen: set[int] = set()
    for event in asked.events():
        seen |= {choice["index"] for choice in event["choices"]}
        if len(seen) == 4:
            break
    assert held(app)["inflight"] == 4
    asked.leave()
    wait_free(app)


def test_a_request_that_ends_by_itself_is_not_aborted(app: RunningApp) -> None:
    aborted = app.total("aborted_requests")
    for stream in (True, False):
        assert ask(app.base_url, prompt(70, 5), 20, stream=stream).finish_reason == "length"
        assert ask(app.base_url, prompt(70, 5), 1, stream=stream).finish_reason == "length"
    wait_free(app)
    assert app.total("aborted_requests") == aborted


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_prompt_that_is_too_long_is_refused_and_nothing_is_begun(app: RunningApp, stream: bool) -> None:
    prompt_tokens = app.total("prompt_tokens")
    answered = ask(app.base_url, prompt(5000, 6), 16, stream=stream)
    assert answered.status == 400
    assert answered.error is not None
    assert answered.error["code"] == "context_length_exceeded"
    assert answered.tokens == []
    wait_free(app)
    assert app.total("prompt_tokens") == prompt_tokens
