"""The global store in the running app: who computes what, where the bytes lie, and that nothing grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import psutil
import pytest
import ray
from ray import serve
from ray._private.internal_api import memory_summary

from actors.addresses import StoreAddress, address_of
from migrate.roster import Member
from tests.app_insides import processes, store_stats, unique_bytes, wait_free
from tests.asked import SERVED, Answered, ask
from tests.engine_driver import make_prompt
from tests.running_app import APP_NAME, Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

BLOCK = 32
ARGS: dict[str, Any] = {
    "model": "random/llama-8x8",
    "served_model_name": SERVED,
    "default_sampling": {"temperature": 0},
    "engine": {"dtype": "float32", "block_tokens": BLOCK, "kv_cache_blocks": 160, "max_batch_tokens": 256},
    "store": {"fetch_timeout_s": 30.0, "pull_timeout_s": 30.0},  # what comes late is no miss here
    **small_roles(prefill=2),
}
BYTES_PER_TOKEN = 8 * 8 * 8 * 2 * 4
"""Layers, heads, numbers a head, K and V, float32."""
MIB = 1 << 20


@pytest.fixture
def app(deploy: Deploy) -> Iterator[RunningApp]:
    app = deploy(ARGS)
    wait_free(app)
    yield app
    wait_free(app)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def answered(app: RunningApp, tokens: tuple[int, ...], max_tokens: int = 4) -> Answered:
    answer = ask(app.base_url, tokens, max_tokens)
    assert (answer.status, len(answer.tokens)) == (200, max_tokens)
    return answer


def counters(member: Member) -> dict[str, Any]:
    stats: dict[str, Any] = ray.get(address_of(member).actor.stats.remote(), timeout=30)
    return stats


NAMES = ("prompt_tokens", "cached_prompt_tokens", "computed_prompt_tokens", "recomputed_tokens")


def totals(app: RunningApp, role: str) -> dict[str, int]:
    return {name: app.total(name, role) for name in NAMES}


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 10 * BLOCK + 7])
def test_decode_computes_no_prompt_token_and_the_counts_add_up(app: RunningApp, length: int) -> None:
    before = totals(app, "prefill"), totals(app, "decode")
    shared, tokens = prompt(3 * BLOCK, 1), prompt(length, 2)
    asked_for = [tokens, tokens, tokens, (*shared, *tokens), (*shared, *tokens), (*shared, *prompt(length, 3))]
    answers = [answered(app, each) for each in asked_for]
    prefill, decode = (
        {name: now[name] - then[name] for name in NAMES}
        for now, then in zip((totals(app, "prefill"), totals(app, "decode")), before, strict=True)
    )
    assert decode == dict.fromkeys(NAMES, 0)
    assert prefill["prompt_tokens"] == sum(map(len, asked_for))
    assert prefill["prompt_tokens"] == prefill["cached_prompt_tokens"] + prefill["computed_prompt_tokens"]
    assert prefill["cached_prompt_tokens"] == sum(answer.cached_tokens for answer in answers)
    # All full blocks of what was asked before are found; the last token of a prompt is always computed.
    for repeated in (1, 2, 4):
        assert answers[repeated].cached_tokens == (len(asked_for[repeated]) - 1) // BLOCK * BLOCK
    assert answers[5].cached_tokens >= len(shared)


def test_ray_shows_which_actor_is_which(app: RunningApp) -> None:
    members = app.members()
    control = serve.get_deployment_handle("ControlServer", APP_NAME)
    store: StoreAddress = control.store_address.remote(members[0].node_id).result(timeout_s=30)
    shown = [(address_of(member).actor, f"Worker({member.worker_id})") for member in members]
    shown += [(actor, f"NodeStore({node_id[:8]})") for node_id, actor in store.stores.items()]
    shown += [(actor, f"DirectoryActor({number})") for number, actor in enumerate(store.directory)]
    assert len(shown) == 3 + 1 + 1
    said = ray.get([actor.__ray_call__.remote(repr) for actor, _ in shown], timeout=30)
    assert said == [name for _, name in shown]


def test_a_prefill_worker_hits_what_the_other_one_stored(app: RunningApp) -> None:
    before = {member.worker_id: counters(member) for member in app.members("prefill")}
    tokens = prompt(20 * BLOCK, 4)
    first = answered(app, tokens)
    later: list[Answered] = []

    def have_both_served() -> bool:
        # At the same time, since one after the other they would all go to the faster worker.
        with ThreadPoolExecutor(4) as pool:
            later.extend(pool.map(lambda _: answered(app, tokens), range(4)))
        return all(counters(m)["prompt_tokens"] > before[m.worker_id]["prompt_tokens"] for m in app.members("prefill"))

    wait_until(have_both_served, 60.0, "one prefill worker got no request")
    assert first.cached_tokens == 0
    assert [answer.cached_tokens for answer in later] == [19 * BLOCK] * len(later)
    assert {tuple(answer.tokens) for answer in later} == {tuple(first.tokens)}
    # One has computed them; the other has brought them in, once or several times at the same time.
    fetched = [counters(m)["fetched_tokens"] - before[m.worker_id]["fetched_tokens"] for m in app.members("prefill")]
    assert min(fetched) == 0
    assert max(fetched) >= 19 * BLOCK


def test_a_request_without_a_temperature_gets_the_configured_one(app: RunningApp) -> None:
    tokens = prompt(2 * BLOCK, 6)
    greedy = answered(app, tokens, 16)
    left_out = [ask(app.base_url, tokens, 16, temperature=None, seed=seed) for seed in (1, 2)]
    drawn = [ask(app.base_url, tokens, 16, temperature=1, seed=seed) for seed in (1, 2)]
    assert [answer.tokens for answer in left_out] == [greedy.tokens] * 2
    assert drawn[0].tokens != drawn[1].tokens  # so it does make a difference


def test_echoed_logprobs_make_decode_compute_nothing(app: RunningApp) -> None:
    before = totals(app, "decode")
    answer = ask(app.base_url, prompt(100, 5), 4, stream=False, echo=True, logprobs=2)
    assert len(answer.tokens) == 104
    assert totals(app, "decode") == before


def object_store_bytes() -> int:
    """What the raylet's shared memory holds."""
    summary = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB", summary)
    assert found, summary
    return int(found[1]) * MIB


def test_parts_lie_in_the_object_store_and_not_in_the_memory_of_their_owner(app: RunningApp) -> None:
    for seed in range(3):  # the store's process has done all it does before
        answered(app, prompt(200, seed))
    wait_free(app)
    own, shared, used = unique_bytes("ray::NodeStore"), object_store_bytes(), used_bytes()
    lengths = [4000] * 8
    for seed, length in enumerate(lengths):
        answered(app, prompt(length, 10 + seed))
    wait_free(app)
    stored = used_bytes() - used
    expected = sum(length // BLOCK * BLOCK for length in lengths) * BYTES_PER_TOKEN
    assert expected <= stored <= 1.1 * expected  # and the headers
    assert stored - 2 * MIB <= object_store_bytes() - shared <= 1.1 * stored + 2 * MIB
    assert unique_bytes("ray::NodeStore") - own < 0.1 * stored


def used_bytes() -> int:
    return sum(store.used_bytes for store in store_stats()["stores"].values())


def test_memory_does_not_grow_with_the_number_of_requests(app: RunningApp) -> None:
    titles = ("ray::Worker", "ray::NodeStore", "ray::DirectoryActor", "ray::ServeReplica:equipoise:Ingress")
    # The same prompts again and again: what is stored stays the same, and all blocks have been touched.
    prompts = [prompt(60 + number, number) for number in range(60)]

    def after(rounds: int) -> dict[int, int]:
        asked = [(prompts[number % len(prompts)], 2 + number % 7) for number in range(rounds * len(prompts))]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda each: answered(app, *each), asked))
        wait_free(app)
        return {process.pid: own_bytes(process) for title in titles for process in processes(title)}

    marks = [after(3), after(2), after(2), after(2)]
    assert all(mark.keys() == marks[0].keys() for mark in marks)
    # An allocator takes more now and then, by megabytes; what leaks grows in every stretch of 120 requests.
    growth = {pid: [later[pid] - mark[pid] for mark, later in pairwise(marks)] for pid in marks[0]}
    assert all(min(grown) < MIB for grown in growth.values()), growth


def own_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)
