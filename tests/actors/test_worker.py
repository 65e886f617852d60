"""Workers as ingresses and the store see them, without Serve: what becomes of requests that end early."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.addresses import StoreAddress
from actors.engine.config import EngineConfig
from actors.engine.request import FINISH_LENGTH, EngineRequest, TokenEvent
from actors.messages import HandOver, Submission, WorkerMessage
from actors.model_source import resolve_model
from actors.worker import Worker
from actors.worker_settings import WorkerSettings
from kv.directory_actor import DirectoryActor
from kv.extents import PullReceipt
from kv.fetch_choice import FetchRun
from kv.layout import KvLayout
from kv.node_store import NodeStore
from kv.part_range import PartRange
from kv.parts import PartExpectation, decode_part
from migrate.load import Role
from tests.engine_driver import greedy, make_prompt
from tests.reference import assert_greedy, load_reference
from tests.running_app import wait_until

pytestmark = pytest.mark.cluster

MODEL = "random/llama-4x8"
ENGINE = EngineConfig(dtype="float32", block_tokens=64, kv_cache_blocks=64, max_batch_tokens=128, kernels="torch")
"""Blocks of 128 KiB, so that a tail is an object of its own; prompts of several blocks take several steps. Torch's
operators are the slower ones, and answers are to take seconds."""
SILENCE_S = 3.0


class ProbedWorker(Worker):
    """A worker that can be got at."""

    async def pid(self) -> int:
        return os.getpid()

    async def measure_fetches(self, bytes_per_s: float) -> None:
        """As if many had been that fast."""
        run = FetchRun(num_tokens=1, num_bytes=8 << 20, tier="dram")
        for _ in range(500):
            self._exchange.rates.fetched([run], run.num_bytes / bytes_per_s)

    async def pause_exports(self) -> None:
        """Every copy waits for `resume_exports`."""
        self._copies, self._may_copy, export = threading.Semaphore(0), threading.Event(), self._exchange.export

        def wait_and_export(*arguments: Any) -> Any:
            self._copies.release()
            assert self._may_copy.wait(60)
            return export(*arguments)

        self._exchange.export = wait_and_export  # type: ignore[method-assign]

    async def wait_copy(self) -> None:
        """Until one more copy has begun."""
        await asyncio.to_thread(self._copies.acquire)

    async def resume_exports(self) -> None:
        self._may_copy.set()
        del self._exchange.export

    async def block(self) -> None:
        """Keeps the engine's thread in one turn until `unblock`."""
        self._unblocked = threading.Event()
        self._thread.call(lambda _: self._unblocked.wait())

    async def unblock(self) -> None:
        self._unblocked.set()


class PlainPuller:
    """In a store's place: takes one block of every export, and says what came of it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        """By export id."""

    async def pull(
        self, worker: Any, export_id: str, keys: list[bytes], _: int, layout: KvLayout, fingerprint: bytes
    ) -> PullReceipt:
        part = PartRange(0, 1, 0, layout.num_layers, 0, layout.num_kv_heads)
        try:
            (buffer,) = await worker.export.remote(export_id, [part])
            decode_part(buffer, PartExpectation(layout, fingerprint, part, (keys[0],)))
            self.outcomes[export_id] = "got it"
        except LookupError as error:
            self.outcomes[export_id] = str(error).splitlines()[-1]
        return PullReceipt(0, None)

    async def seen(self) -> dict[str, str]:
        return self.outcomes


class Cell:
    """A prefill and a decode worker with their store."""

    def __init__(self) -> None:
        directory_class: Any = DirectoryActor
        store_class: Any = NodeStore
        actor: Any = ray.remote(num_cpus=0)(ProbedWorker)
        self.directory = directory_class.remote()
        self.store = store_class.remote("node", [self.directory], 100 << 20)
        self.workers: dict[Role, Any] = {}
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            settings = WorkerSettings(
                MODEL,
                role,
                ENGINE,
                1,
                lease_s=30.0,
                fetch_timeout_s=30.0,
                pull_timeout_s=30.0,
                owner_silence_s=SILENCE_S,
            )
            self.workers[role] = actor.remote(role, settings)
        for role in roles:
            self.use_store(role, self.store)

    def use_store(self, role: Role, store: Any) -> None:
        address = StoreAddress((self.directory,), {"node": store}, "node")
        ray.get(self.workers[role].use_store.remote(address), timeout=120)

    def stop(self) -> None:
        for actor in (*self.workers.values(), self.store, self.directory):
            ray.kill(actor)

    def stats(self, role: Role) -> dict[str, Any]:
        stats: dict[str, Any] = ray.get(self.workers[role].stats.remote(), timeout=30)
        return stats

    def held(self) -> dict[str, int]:
        """Whatever is held for requests anywhere; all zero when nothing leaks."""
        held = {
            f"{role}.{name}": self.stats(role)[name]
            for role in self.workers
            for name in ("live_blocks", "live_requests", "tracked_requests")
        }
        directory = ray.get(self.directory.stats.remote(), timeout=30)
        tails = ray.get(self.store.stats.remote(), timeout=30).num_tails
        return {**held, "leases": directory["num_leases"], "puts": directory["num_puts"], "tails": tails}

    def wait_free(self, limit_s: float = 10.0) -> None:
        wait_until(lambda: not any(self.held().values()), limit_s, "something is still held")


class Client:
    """An ingress: submits, and collects what one worker says."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.owner = uuid.uuid4().hex
        self.events: list[TokenEvent] = []
        self.hand_overs: list[HandOver] = []
        self.sessions: list[int] = []

    def request(self, prompt: tuple[int, ...], max_tokens: int = 8, **more: Any) -> EngineRequest:
        return EngineRequest(uuid.uuid4().hex, prompt, greedy(max_tokens), owner=self.owner, **more)

    def submit(self, request: EngineRequest, hand_over: HandOver | None = None) -> EngineRequest:
        self.worker.submit.remote([Submission(request, hand_over)])
        return request

    def collect(self, timeout_s: float = 1.0) -> WorkerMessage:
        message: WorkerMessage = ray.get(self.worker.collect.remote(self.owner, timeout_s), timeout=60)
        self.events += message.events
        self.hand_overs += message.hand_overs
        self.sessions.append(message.session)
        return message

    def tokens(self, request: EngineRequest) -> list[int]:
        return [e.token_id for e in self.events if e.request_id == request.request_id and e.token_id is not None]

    def wait_token(self, request: EngineRequest, count: int = 1) -> None:
        while len(self.tokens(request)) < count:
            self.collect()

    def wait_end(self, request: EngineRequest) -> TokenEvent:
        while True:
            for event in self.events:
                if event.request_id == request.request_id and event.finish_reason is not None:
                    return event
            self.collect()

    def wait_hand_over(self, request: EngineRequest) -> HandOver:
        while True:
            for hand_over in self.hand_overs:
                if hand_over.request_id == request.request_id:
                    return hand_over
            self.collect()


@pytest.fixture(scope="module")
def cell(ray_cluster: None) -> Iterator[Cell]:
    cell = Cell()
    yield cell
    cell.stop()


@pytest.fixture(scope="module")
def puller(ray_cluster: None) -> Iterator[Any]:
    actor: Any = ray.remote(num_cpus=0)(PlainPuller).remote()
    ray.get(actor.seen.remote(), timeout=120)
    yield actor
    ray.kill(actor)


@pytest.fixture
def prefill(cell: Cell) -> Iterator[Client]:
    yield Client(cell.workers["prefill"])
    cell.wait_free(3 * SILENCE_S)


@pytest.fixture
def decode(cell: Cell) -> Client:
    return Client(cell.workers["decode"])


def handed_over(prefill: Client, prompt: tuple[int, ...], max_tokens: int = 8) -> tuple[EngineRequest, HandOver]:
    request = prefill.submit(prefill.request(prompt, max_tokens, hand_over=True))
    return request, prefill.wait_hand_over(request)


def as_decode(decode: Client, request: EngineRequest, first: int, **more: Any) -> EngineRequest:
    return dataclasses.replace(request, owner=decode.owner, hand_over=False, output_token_ids=(first,), **more)


@pytest.mark.parametrize("tokens", [63, 64, 65, 128, 200])
def test_decode_computes_nothing_of_a_prompt_that_was_handed_over(
    cell: Cell, prefill: Client, decode: Client, tokens: int
) -> None:
    before = cell.stats("decode")["computed_prompt_tokens"]
    request, hand_over = handed_over(prefill, make_prompt(tokens, seed=1, vocab=200))
    follow_up = decode.submit(as_decode(decode, request, prefill.tokens(request)[0]), hand_over)
    assert decode.wait_end(follow_up).finish_reason == FINISH_LENGTH
    assert len(decode.tokens(follow_up)) == 7
    assert cell.stats("decode")["computed_prompt_tokens"] == before


def test_a_prefix_that_is_slow_to_fetch_is_computed_but_not_one_that_was_handed_over(
    cell: Cell, prefill: Client, decode: Client
) -> None:
    names = ("computed_prompt_tokens", "fetched_tokens", "fetch_declined_tokens")
    prompts = [make_prompt(300, seed, vocab=200) for seed in (20, 21)]
    stored = [handed_over(prefill, prompt) for prompt in prompts]
    ray.get(decode.worker.measure_fetches.remote(1000.0), timeout=30)
    try:
        before = cell.stats("decode")
        computed = decode.submit(decode.request(prompts[0]))
        decode.wait_end(computed)
        after = cell.stats("decode")
        # All four full blocks are in the store.
        assert [after[name] - before[name] for name in names] == [300, 0, 256]
        follow_up = decode.submit(as_decode(decode, stored[1][0], prefill.tokens(stored[1][0])[0]), stored[1][1])
        decode.wait_end(follow_up)
        end = cell.stats("decode")
        assert [end[name] - after[name] for name in names] == [0, 300, 0]
    finally:
        ray.get(decode.worker.measure_fetches.remote(16e9), timeout=30)
        prefill.worker.abort.remote([request.request_id for request, _ in stored])
    answers = [decode.tokens(computed), [*prefill.tokens(stored[1][0]), *decode.tokens(follow_up)]]
    assert_greedy(load_reference(resolve_model(MODEL).path), prompts, answers)


def test_a_request_aborted_before_it_comes_is_not_begun(cell: Cell, prefill: Client) -> None:
    before = cell.stats("prefill")["prompt_tokens"]
    gone = prefill.request(make_prompt(100, seed=2, vocab=200))
    prefill.worker.abort.remote([gone.request_id])
    prefill.submit(gone)
    kept = prefill.submit(prefill.request(make_prompt(50, seed=3, vocab=200)))
    prefill.wait_end(kept)
    assert prefill.tokens(gone) == []
    assert cell.stats("prefill")["prompt_tokens"] == before + 50


def test_aborts_at_any_moment_free_everything_on_both_sides(cell: Cell, prefill: Client, decode: Client) -> None:
    rng = random.Random(7)
    lengths = [20, 64, 100, 300, 700]
    requests = []
    for number in range(60):
        # Every third one shares its prefix with others, so that there is something to look up, lease and fetch.
        prompt = make_prompt(rng.choice(lengths), seed=number if number % 3 else 0, vocab=200)
        requests.append(prefill.submit(prefill.request(prompt, 200, hand_over=True)))
        if rng.random() < 0.5:
            prefill.collect(rng.random() * 0.05)
        for hand_over in prefill.hand_overs:
            request = next(r for r in requests if r.request_id == hand_over.request_id)
            if rng.random() < 0.8:
                decode.submit(as_decode(decode, request, prefill.tokens(request)[0]), hand_over)
        prefill.hand_overs.clear()
        for victim in rng.sample(requests, k=min(3, len(requests))):
            for client in (prefill, decode):
                client.worker.abort.remote([victim.request_id])
    for client in (prefill, decode):
        client.worker.abort.remote([request.request_id for request in requests])
    cell.wait_free()
    # And all is well for the next one.
    request, hand_over = handed_over(prefill, make_prompt(150, seed=99, vocab=200))
    follow_up = decode.submit(as_decode(decode, request, prefill.tokens(request)[0]), hand_over)
    assert decode.wait_end(follow_up).finish_reason == FINISH_LENGTH


def test_aborts_around_the_end_of_an_answer_free_everything_and_lose_nothing(
    cell: Cell, prefill: Client, decode: Client
) -> None:
    rng = random.Random(11)
    before = cell.stats("decode")["published_answer_blocks"]
    whole: list[tuple[int, ...]] = []
    for round_ in range(5):
        requests = []
        for number in range(6):
            prompt = make_prompt(50, seed=1000 + 10 * round_ + number, vocab=200)
            requests.append(decode.submit(decode.request(prompt, max_tokens=rng.choice([16, 30, 80]))))
        for request in rng.sample(requests, k=6):
            if rng.random() < 0.5:
                decode.wait_end(request)
                whole.append((*request.prompt_token_ids, *decode.tokens(request)))
            decode.worker.abort.remote([request.request_id])
        cell.wait_free()
    # An answer that had ended for its client is stored, whatever was aborted then.
    stored = sum((len(tokens) - 1) // ENGINE.block_tokens for tokens in whole if len(tokens) > ENGINE.block_tokens)
    assert stored > 0
    assert cell.stats("decode")["published_answer_blocks"] - before >= stored


@pytest.mark.parametrize("is_needed", [False, True])
def test_what_is_read_of_an_answer_whose_blocks_were_needed_is_void(
    cell: Cell, prefill: Client, decode: Client, puller: Any, is_needed: bool
) -> None:
    before = cell.stats("decode")["answers_given_up"]
    cell.use_store("decode", puller)
    ray.get(decode.worker.pause_exports.remote(), timeout=30)
    try:
        answer = decode.submit(decode.request(make_prompt(130, seed=2000 + is_needed, vocab=200), max_tokens=70))
        decode.wait_end(answer)
        ray.get(decode.worker.wait_copy.remote(), timeout=30)
        if is_needed:
            # All blocks of the pool but one: it is served though a copy is under way.
            large = decode.submit(decode.request(make_prompt(62 * 64, seed=2002, vocab=200), max_tokens=1))
            decode.wait_end(large)
        ray.get(decode.worker.resume_exports.remote(), timeout=30)
        name = answer.request_id
        wait_until(lambda: name in ray.get(puller.seen.remote(), timeout=30), 10.0, "the pull does not end")
        outcome = ray.get(puller.seen.remote(), timeout=30)[name]
        assert outcome.endswith("is not held any more" if is_needed else "got it")
        assert cell.stats("decode")["answers_given_up"] == before + is_needed
    finally:
        cell.use_store("decode", cell.store)
    cell.wait_free()


def test_the_tail_of_a_hand_over_that_nobody_takes_is_freed_by_the_abort(cell: Cell, prefill: Client) -> None:
    request, hand_over = handed_over(prefill, make_prompt(100, seed=4, vocab=200))
    assert isinstance(hand_over.receipt, PullReceipt)
    assert hand_over.receipt.tail is not None
    assert hand_over.receipt.tail.tail_id is not None
    assert cell.held()["tails"] == 1
    prefill.worker.abort.remote([request.request_id])
    cell.wait_free()


def test_no_tail_is_kept_of_a_request_that_ends_with_its_first_token(cell: Cell, prefill: Client) -> None:
    before = ray.get(cell.store.stats.remote(), timeout=30)
    request = prefill.submit(prefill.request(make_prompt(100, seed=5, vocab=200), max_tokens=1, hand_over=True))
    assert prefill.wait_end(request).finish_reason == FINISH_LENGTH
    cell.wait_free()
    after = ray.get(cell.store.stats.remote(), timeout=30)
    assert after.num_stored_blocks == before.num_stored_blocks + 1
    assert after.num_expired_tails == before.num_expired_tails


def test_a_tail_whose_prefix_is_gone_is_freed_and_computed_again(cell: Cell, prefill: Client, decode: Client) -> None:
    request, hand_over = handed_over(prefill, make_prompt(100, seed=6, vocab=200))
    # Under another salt the store has nothing of the prefix.
    follow_up = as_decode(decode, request, prefill.tokens(request)[0], salt=b"other")
    before = cell.stats("decode")["computed_prompt_tokens"]
    decode.submit(follow_up, hand_over)
    assert decode.wait_end(follow_up).finish_reason == FINISH_LENGTH
    assert cell.stats("decode")["computed_prompt_tokens"] == before + 100
    cell.wait_free()


def test_requests_of_an_ingress_that_fell_silent_are_freed_wherever_they_are(
    cell: Cell, prefill: Client, decode: Client
) -> None:
    silent = {role: cell.stats(role).get("lost_ingresses", 0) for role in cell.workers}
    for role, client in (("prefill", prefill), ("decode", decode)):
        # It would go on for longer than the silence.
        running = client.submit(client.request(make_prompt(70, seed=7, vocab=200), max_tokens=3900))
        client.wait_token(running)
        assert cell.held()[f"{role}.live_requests"] == 1
    request, _ = handed_over(prefill, make_prompt(100, seed=8, vocab=200))
    assert cell.held()["tails"] == 1
    for role, before in silent.items():  # each has noticed by itself, also where its request is at its end by then
        wait_until(
            lambda role=role, before=before: cell.stats(role).get("lost_ingresses", 0) > before,
            30.0,
            "nobody misses it",
        )
    cell.wait_free()
    # It was only slow, and is told so.
    for client in (prefill, decode):
        client.collect(0.0)
        assert client.sessions[-1] != client.sessions[-2]
    again = prefill.submit(prefill.request(request.prompt_token_ids))
    assert prefill.wait_end(again).finish_reason == FINISH_LENGTH


def test_a_worker_that_was_stopped_for_a_while_goes_on_with_its_requests(cell: Cell, prefill: Client) -> None:
    request = prefill.submit(prefill.request(make_prompt(70, seed=9, vocab=200), max_tokens=300))
    prefill.wait_token(request, 3)
    pid = ray.get(prefill.worker.pid.remote(), timeout=30)
    waiting = prefill.worker.collect.remote(prefill.owner, 1.0)
    os.kill(pid, signal.SIGSTOP)
    try:
        ready, _ = ray.wait([waiting], timeout=2 * SILENCE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    message = ray.get(waiting, timeout=60)
    prefill.events += message.events
    assert not ready or message.events  # at most one answer was on its way already
    assert prefill.wait_end(request).finish_reason == FINISH_LENGTH
    assert len(prefill.tokens(request)) == 300
    assert len(set(prefill.sessions)) == 1


def test_a_blocked_engine_shows_in_the_health_check_and_is_well_afterwards(cell: Cell, prefill: Client) -> None:
    ray.get(prefill.worker.check_health.remote(0.5), timeout=30)
    prefill.worker.block.remote()

    def is_stalled() -> bool:
        try:
            ray.get(prefill.worker.check_health.remote(0.5), timeout=30)
        except RuntimeError as error:
            return "has been running" in str(error)
        return False

    wait_until(is_stalled, 30.0, "the health check does not notice")
    prefill.worker.unblock.remote()
    request = prefill.submit(prefill.request(make_prompt(70, seed=10, vocab=200)))
    assert prefill.wait_end(request).finish_reason == FINISH_LENGTH
    ray.get(prefill.worker.check_health.remote(0.5), timeout=30)


def test_parts_are_given_of_requests_that_are_being_pulled_only(cell: Cell, prefill: Client) -> None:
    with pytest.raises(LookupError, match="is not held any more"):
        ray.get(prefill.worker.export.remote("nobody", []), timeout=30)


def test_a_request_that_can_never_be_served_is_an_error_and_holds_nothing(cell: Cell, prefill: Client) -> None:
    request = prefill.submit(prefill.request(make_prompt(70, seed=11, vocab=200), max_tokens=100_000))
    started_s = time.monotonic()
    assert "exceed the context" in (prefill.wait_end(request).error or "")
    assert time.monotonic() - started_s < 30
