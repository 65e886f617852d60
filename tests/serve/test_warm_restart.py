"""What is on disk outlives the app, the store's process and the directory's, of which there are two: a known prefix is
a hit, with the right tokens."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayError

from actors.addresses import address_of
from app.api_keys import PUBLIC, derive_salt
from kv.directory_client import DirectoryClient
from kv.disk.extent_file import verify_file
from kv.keys import block_keys
from kv.shards import shard_of_chain
from kv.store_stats import StoreStats
from tests.app_insides import replica, shards, store_process, store_stats, wait_free
from tests.asked import SERVED, Answered, ask
from tests.engine_driver import make_prompt
from tests.judge import Judge
from tests.running_app import Deploy, RunningApp, small_roles, wait_until

pytestmark = pytest.mark.cluster

MODEL = "random/llama-8x8"
BLOCK = 16
POOL_BLOCKS = 70
ANSWER = 6
SHARDS = 2
BACK_LIMIT_S = 120.0
SEEDS = itertools.count(10_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


class Restarts:
    """The app over one folder, and its restarts."""

    def __init__(self, deploy: Deploy, folder: Path) -> None:
        self._deploy = deploy
        self._folder = folder
        self._count = 0

    def app(self) -> RunningApp:
        """The running one."""
        return self._deploy(
            {
                "model": MODEL,
                "served_model_name": SERVED,
                "engine": {
                    "dtype": "float32",
                    "block_tokens": BLOCK,
                    "kv_cache_blocks": POOL_BLOCKS,
                    "max_batch_tokens": 256,
                },
                "store": {
                    "dram_gib": 0.1,
                    "disk": {"folder": str(self._folder), "limit_gib": 0.5},
                    "fetch_timeout_s": 30.0,
                    "directory_shards": SHARDS,
                    # `deploy` keeps the app that it has unless something differs.
                    "lease_s": 30.0 + self._count,
                },
                **small_roles(),
            }
        )

    def restart(self) -> RunningApp:
        """Deletes the app, as a user does who stops it, and deploys it again."""
        self.app()
        self._count += 1
        return self.app()


@pytest.fixture(scope="module")
def restarts(deploy: Deploy, folder: Path) -> Restarts:
    return Restarts(deploy, folder)


@pytest.fixture
def app(restarts: Restarts) -> RunningApp:
    return restarts.app()


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(MODEL)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return make_prompt(length, seed, vocab=250)


def known(length: int) -> int:
    return (length - 1) // BLOCK * BLOCK


def asked(app: RunningApp, judge: Judge, prompts: Sequence[tuple[int, ...]]) -> list[Answered]:
    """The answers, checked against transformers."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda tokens: ask(app.base_url, tokens, ANSWER), prompts))
    judge.check(prompts, answers, ANSWER)
    return answers


def node_store() -> StoreStats:
    (stats,) = store_stats()["stores"].values()
    assert isinstance(stats, StoreStats)
    return stats


def hit_tokens_on_disk() -> int:
    return int(store_stats()["directory"]["hit_blocks_disk"]) * BLOCK


def is_scanned() -> bool:
    """Whether there is one store, which knows all that is in its folder."""
    try:
        stores = store_stats()["stores"]
    except RayError:  # it is being started again
        return False
    return len(stores) == 1 and all(
        isinstance(store, StoreStats) and store.disk is not None and store.disk.is_scanned for store in stores.values()
    )


def test_a_known_prefix_is_a_disk_hit_after_a_restart(restarts: Restarts, judge: Judge) -> None:
    prompts = [prompt(length, length) for length in (BLOCK + 1, 10 * BLOCK, 40 * BLOCK + 7)]
    # It is stopped right after the last answer.
    prompts += [prompt(60 * BLOCK + 5, 100 + number) for number in range(6)]
    prompts += [prompt(5 * BLOCK + number, 120 + number) for number in range(23)]
    first = asked(restarts.app(), judge, prompts)
    assert {answer.cached_tokens for answer in first} == {0}
    app = restarts.restart()
    wait_until(is_scanned, BACK_LIMIT_S, "the disk was not listed")
    again = asked(app, judge, prompts)
    hits = [known(len(each)) for each in prompts]
    assert [answer.cached_tokens for answer in again] == hits
    assert hit_tokens_on_disk() >= sum(hits)
    disk = node_store().disk
    assert disk.num_found_extents >= len(prompts)
    assert (disk.num_unusable_files, disk.refusals) == (0, {})
    assert app.total("fetched_tokens", "prefill") == sum(hits)
    assert app.total("computed_prompt_tokens", "prefill") == sum(map(len, prompts)) - sum(hits)
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]


def fill_devices(app: RunningApp, judge: Judge) -> None:
    """So that no worker has anything else on its device."""
    asked(app, judge, [prompt(POOL_BLOCKS * BLOCK - ANSWER, next(SEEDS))])


def crash_store() -> None:
    process = store_process()
    os.kill(process.pid, signal.SIGKILL)
    wait_replaced(process.pid)


def wait_replaced(pid: int) -> None:
    """Until there is one store again, and another one, which knows all that is in its folder."""

    def is_replaced() -> bool:
        try:
            return store_process().pid != pid and is_scanned()
        except RayError:  # it is being started again
            return False

    wait_until(is_replaced, BACK_LIMIT_S, "there is no store with the disk")


def test_while_a_shard_of_the_directory_is_started_again_the_other_one_knows_its_own(
    app: RunningApp, judge: Judge
) -> None:
    prompts = [prompt(30 * BLOCK + 1, 500 + number) for number in range(8)]
    fingerprint = address_of(app.members()[0]).facts.fingerprint
    salt = derive_salt(PUBLIC.salt, None)
    chains = [block_keys(tokens, BLOCK, fingerprint, salt) for tokens in prompts]
    by_shard = [shard_of_chain(keys, SHARDS) for keys in chains]
    assert set(by_shard) == {0, 1}
    assert len(shards()) == SHARDS
    asked(app, judge, prompts)
    wait_free(app)
    fill_devices(app, judge)

    os.kill(ray.get(shards()[0].__ray_call__.remote(lambda _: os.getpid()), timeout=30), signal.SIGKILL)
    answers = asked(app, judge, prompts)
    for shard, answer in zip(by_shard, answers, strict=True):
        assert answer.cached_tokens in ((0, 30 * BLOCK) if shard == 0 else (30 * BLOCK,))

    def is_all_known() -> bool:
        try:
            return all(asyncio.run(DirectoryClient(shards()).match_blocks(keys)) == 30 for keys in chains)
        except RayError:  # it is being started again
            return False

    wait_until(is_all_known, BACK_LIMIT_S, "the shard was not told what the store has")


def test_what_was_written_before_the_store_was_killed_is_there(app: RunningApp, judge: Judge) -> None:
    shared = prompt(30 * BLOCK + 1, 200)
    asked(app, judge, [shared])
    wait_free(app)
    wait_until(lambda: node_store().disk.num_queued_extents == 0, 30.0, "it was not written")
    fill_devices(app, judge)
    crash_store()
    assert (node_store().num_extents, node_store().num_pulls) == (0, 0)
    fetched = app.total("fetched_tokens", "prefill")
    (again,) = asked(app, judge, [shared])
    assert again.cached_tokens == 30 * BLOCK
    assert app.total("fetched_tokens", "prefill") - fetched == 30 * BLOCK
    assert hit_tokens_on_disk() >= 30 * BLOCK


def test_a_store_that_is_killed_while_it_writes_leaves_nothing_broken(
    app: RunningApp, judge: Judge, folder: Path
) -> None:
    prompts = [prompt(60 * BLOCK + number, 300 + number) for number in range(6)]
    before = set(folder.glob("??/*"))
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asked, app, judge, prompts)
        wait_until(lambda: bool(set(folder.glob("??/*")) - before), 60.0, "nothing was written")
        crash_store()
        answers.result()
    asked(app, judge, prompts)
    wait_free(app, 30.0)
    wait_until(lambda: node_store().disk.num_queued_extents == 0, 30.0, "it was not written")
    assert node_store().disk.refusals == {}
    files = list(folder.glob("??/*.kv"))
    for path in files:
        verify_file(path)
    assert len(files) == node_store().disk.num_extents


def lose_control_replica() -> None:
    ray.kill(replica("ControlServer"))


def lose_a_shard_for_good() -> None:
    """Which the control replica notices, and goes: nobody who has the handle could be given another one."""
    ray.kill(shards()[1])


@pytest.mark.parametrize("lose", [lose_control_replica, lose_a_shard_for_good])
def test_the_store_of_a_control_replica_that_died_takes_over_the_disk(
    app: RunningApp, judge: Judge, lose: Callable[[], None]
) -> None:
    shared = prompt(20 * BLOCK + 1, next(SEEDS))
    asked(app, judge, [shared])
    wait_free(app)
    wait_until(lambda: node_store().disk.num_queued_extents == 0, 30.0, "it was not written")
    process = store_process()
    lose()
    wait_replaced(process.pid)

    def is_hit() -> bool:
        """Workers learn of the new store a little later; what they computed till then is on their devices."""
        fill_devices(app, judge)
        fetched = app.total("fetched_tokens", "prefill")
        (again,) = asked(app, judge, [shared])
        return again.cached_tokens == 20 * BLOCK and app.total("fetched_tokens", "prefill") - fetched == 20 * BLOCK

    wait_until(is_hit, BACK_LIMIT_S, "what was on disk is not found")
    assert hit_tokens_on_disk() >= 20 * BLOCK
