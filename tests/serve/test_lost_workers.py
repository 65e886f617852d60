"""Anything may die at any moment: requests go on with the right tokens, and what is gone is replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import RayError

from actors.addresses import address_of
from migrate.roster import Member
from tests.app_insides import directory, held, process_of, processes, replica, reported, store_process, wait_free
from tests.asked import SERVED, Asked, ask
from tests.engine_driver import make_prompt
from tests.judge import Judge
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
ARGS: dict[str, Any] = {
    "model": MODEL,
    "served_model_name": SERVED,
    "engine": {"dtype": "float32", "block_tokens": 32, "kv_cache_blocks": 384, "max_batch_tokens": 64},
    "store": {"lease_s": 6.0},  # what a killed worker had leased is held for so long
    **small_roles(prefill=2),
}
BACK_LIMIT_S = 120.0
"""For a process to be replaced on a busy machine."""


@pytest.fixture
def app(deploy: Deploy) -> Iterator[RunningApp]:
    app = deploy(ARGS)
    wait_whole(app)
    yield app
    wait_whole(app)
    wait_free(app, 30.0)


def wait_whole(app: RunningApp) -> None:
    """Until all workers are there and the ingress knows them, and them only."""

    def is_whole() -> bool:
        if app.get("/health")[0] != 200:
            return False
        known = {worker["worker_id"] for worker in app.get("/debug/blocks")[1]["workers"]}
        return len(known) == 3 and known == {member.worker_id for member in app.members()}

    wait_until(is_whole, BACK_LIMIT_S, "not all workers are back")


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(MODEL)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def kill_worker(_: RunningApp, member: Member) -> None:
    ray.kill(address_of(member).actor)


def kill_replica(_: RunningApp, member: Member) -> None:
    """The Serve replica, whose child the worker is."""
    deployment = {"prefill": "PrefillServer", "decode": "DecodeServer"}[member.role]
    ray.kill(replica(deployment, member.worker_id.removeprefix(f"{member.role}-")))


def busy_member(app: RunningApp, role: str) -> Member:
    """The worker of a role that has the one request that there is."""
    busy = [w["worker_id"] for w in app.get("/debug/blocks")[1]["workers"] if w["role"] == role and w["live_blocks"]]
    (member,) = [member for member in app.members(role) if member.worker_id in busy]
    return member


Kill = Callable[[RunningApp, Member], None]
KILLS = pytest.mark.parametrize("kill", [kill_worker, kill_replica])


@KILLS
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_a_request_whose_prefill_worker_dies_is_answered_by_the_other(
    app: RunningApp, judge: Judge, kill: Kill, stream: bool
) -> None:
    asked_for = prompt(3500, 10 * stream + (kill is kill_worker))
    asked = Asked(app.base_url, asked_for, 16, stream=stream)
    wait_until(lambda: reported(app, "prefill", "running_requests") == 1, 30.0, "the request did not get there")
    kill(app, busy_member(app, "prefill"))
    judge.check([asked_for], [asked.answer()], 16)


@KILLS
def test_streams_go_on_when_the_decode_worker_dies(app: RunningApp, judge: Judge, kill: Kill) -> None:
    prompts = [prompt(50, seed) for seed in range(4)]
    streams = [Asked(app.base_url, tokens, 600) for tokens in prompts]
    begun = [asked.wait_tokens(20) for asked in streams]
    (decode,) = app.members("decode")
    assert reported(app, "decode", "live_blocks")
    kill(app, decode)
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = list(pool.map(Asked.answer, streams))
    for answered, tokens in zip(answers, begun, strict=True):
        answered.tokens[:0] = tokens
    judge.check(prompts, answers, 600)
    assert app.members("decode") != [decode]
    # The new one knew the store before it was sent anything.
    assert app.total("computed_prompt_tokens", "decode") == 0


def test_what_a_prefill_worker_stored_outlives_it(app: RunningApp, judge: Judge) -> None:
    shared = prompt(320, 77)
    before = {member.worker_id: computed(member) for member in app.members("prefill")}
    judge.check([shared], [ask(app.base_url, shared, 8)], 8)
    (first,) = [member for member in app.members("prefill") if computed(member) > before[member.worker_id]]
    kill_worker(app, first)
    wait_until(lambda: first not in app.members(), 30.0, "the dead worker is still listed")
    longer = (*shared, *prompt(40, 78))
    answered = ask(app.base_url, longer, 8)
    judge.check([longer], [answered], 8)
    assert answered.cached_tokens == 320


def computed(member: Member) -> int:
    stats: dict[str, Any] = ray.get(address_of(member).actor.stats.remote(), timeout=30)
    return int(stats["computed_prompt_tokens"])


def crash(process_of_actor: Callable[[], psutil.Process]) -> None:
    """Of a control replica that was replaced the actors stay until it has shut down, and may be named still."""

    def is_killed() -> bool:
        try:
            os.kill(process_of_actor().pid, signal.SIGKILL)
        except RayError:
            return False
        return True

    wait_until(is_killed, 60.0, "there is none to kill")


def kill_directory(_: RunningApp) -> None:
    crash(lambda: process_of(directory()))


def kill_directory_for_good(_: RunningApp) -> None:
    ray.kill(directory())


def kill_store(_: RunningApp) -> None:
    crash(store_process)


def kill_control(_: RunningApp) -> None:
    ray.kill(replica("ControlServer"))


@pytest.mark.parametrize("kill", [kill_directory, kill_directory_for_good, kill_store, kill_control])
def test_requests_go_on_without_the_store_and_it_comes_back(
    app: RunningApp, judge: Judge, kill: Callable[[RunningApp], None], request: pytest.FixtureRequest
) -> None:
    seed = 1000 * (1 + request.node.name.count("_")) + len(request.node.name)
    members = app.members()
    prompts = [prompt(100, seed + number) for number in range(6)]
    streams = [Asked(app.base_url, tokens, 300) for tokens in prompts[:3]]
    begun = [asked.wait_tokens(5) for asked in streams]
    kill(app)
    streams += [Asked(app.base_url, tokens, 300) for tokens in prompts[3:]]
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = list(pool.map(Asked.answer, streams))
    for answered, tokens in zip(answers, begun, strict=False):
        answered.tokens[:0] = tokens
    judge.check(prompts, answers, 300)

    def is_handed_over_by_the_store() -> bool:
        nonlocal seed
        seed += 10
        before = app.total("computed_prompt_tokens", "decode")
        tokens = prompt(100, seed)
        judge.check([tokens], [ask(app.base_url, tokens, 4)], 4)
        return app.total("computed_prompt_tokens", "decode") == before

    wait_until(lambda: len(app.members()) == 3, BACK_LIMIT_S, "the workers did not join again")
    wait_until(is_handed_over_by_the_store, BACK_LIMIT_S, "the store did not come back")
    assert app.members() == members, "workers were replaced that were well"


def test_a_worker_that_restarts_again_and_again_leaves_no_trace(app: RunningApp, judge: Judge) -> None:
    (other, _) = app.members("prefill")
    for number in range(3):
        (victim,) = [member for member in app.members("prefill") if member.worker_id != other.worker_id]
        kill_worker(app, victim)
        tokens = prompt(100, 500 + number)
        judge.check([tokens], [ask(app.base_url, tokens, 8)], 8)
        wait_until(lambda victim=victim: victim not in app.members(), 30.0, "the dead worker is still listed")
        wait_whole(app)
    assert len(app.members()) == 3
    assert len(processes("ray::Worker")) == 3


def test_requests_of_a_dead_ingress_are_freed_everywhere(app: RunningApp) -> None:
    aborted = app.total("aborted_requests", "decode")
    streams = [Asked(app.base_url, prompt(50, 600 + number), 3900) for number in range(4)]
    for asked in streams:
        asked.wait_tokens(5)
    ray.kill(replica("Ingress"))
    wait_until(lambda: app.total("aborted_requests", "decode") == aborted + 4, 60.0, "the requests are not freed")
    for asked in streams:
        asked.leave()
    wait_whole(app)
    wait_until(lambda: not any(held(app).values()), 30.0, "something is still held")
    assert ask(app.base_url, prompt(50, 700), 8).finish_reason == "length"
