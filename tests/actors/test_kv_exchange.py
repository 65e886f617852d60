"""A worker's dealings with a store that is slow, silent or gone: everything it took is given back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError

import actors.kv_pages
from actors.engine.config import EngineConfig
from actors.engine.loading import LoadedModel, load_model
from actors.engine.page_io import read_pages
from actors.engine.request import EngineRequest
from actors.fetch_rates import FetchRates
from actors.found_prefix import FoundPrefix
from actors.kv_exchange import KvExchange
from actors.messages import HandOver
from kv.extents import PullReceipt, TailReceipt
from kv.fetch_choice import FetchRun
from kv.part_range import PartRange
from kv.parts import PartHeader, draft_part
from kv.tiers import Tier
from tests.engine_driver import greedy
from tests.plain_store import BLOCK, PROMPT, PlainStore
from tests.plain_worker import until
from tests.reference import FAMILIES, make_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=32)
    return load_model(make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model")), config)


def hand_over() -> HandOver:
    tail = TailReceipt("s", 5, (PartRange(3, 1, 0, 3, 0, 2),), "t", None)
    return HandOver("r", len(PROMPT), PullReceipt(3, tail))


REQUEST = EngineRequest("r", PROMPT, greedy(4))
FOLLOW_UP = EngineRequest("r", PROMPT, greedy(4), output_token_ids=(7,))


def make_exchange(
    loaded: LoadedModel,
    timeout_s: float = 1000.0,
    prefill_tokens_per_s: float = 1000.0,
    *,
    shares_prefixes: bool = True,
) -> KvExchange:
    rates = FetchRates(lambda: prefill_tokens_per_s, step_s=lambda: 0.0)
    return KvExchange(
        loaded,
        rates,
        lease_s=30.0,
        fetch_timeout_s=timeout_s,
        publish_timeout_s=timeout_s,
        shares_prefixes=shares_prefixes,
    )


def run(
    loaded: LoadedModel, body: Callable[[KvExchange, PlainStore], Awaitable[None]], *, timeout_s: float = 1000.0
) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            store = PlainStore(loaded)
            exchange = make_exchange(loaded, timeout_s)
            exchange.use_store(store.address())
            await body(exchange, store)

    asyncio.run(limited())


def kv_of(loaded: LoadedModel, block_ids: Sequence[int]) -> torch.Tensor:
    part = PartRange(0, len(block_ids), 0, 3, 0, 2)
    payload = draft_part(PartHeader(loaded.layout, b"", part, (b"",) * len(block_ids), BLOCK)).payload
    read_pages(loaded, part, block_ids, payload)
    return torch.from_numpy(payload.copy())


def test_a_prefix_is_found_and_brought_into_the_pages_of_the_request(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        found = await exchange.find(REQUEST, None)
        assert found is not None
        assert found.num_tokens == 3 * BLOCK
        assert store.leases == {1}
        assert await exchange.fetch(found, [4, 9, 2, 7], 0) == 3 * BLOCK
        assert torch.equal(kv_of(loaded, [4, 9, 2]), torch.full_like(kv_of(loaded, [4, 9, 2]), 1.5))
        await until(lambda: not store.leases)
        assert exchange.misses == {}

    run(loaded, body)


def test_without_shared_prefixes_only_what_was_handed_over_is_looked_up(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        exchange = make_exchange(loaded, shares_prefixes=False)
        exchange.use_store(store.address())
        assert await exchange.find(REQUEST, None) is None
        assert store.lookups == 0
        found = await exchange.find(FOLLOW_UP, hand_over())
        assert found is not None
        assert found.num_tokens == len(PROMPT)
        exchange.give_up(found)
        await until(lambda: not store.leases)

    run(loaded, body)


MIXED: tuple[Tier, ...] = ("dram", "disk", "dram")


def slow_disk(rates: FetchRates, bytes_per_s: float) -> None:
    for _ in range(400):
        rates.fetched([FetchRun(1, 8 << 20, "disk")], (8 << 20) / bytes_per_s)


@pytest.mark.parametrize(
    ("held", "prefill_tokens_per_s", "fetched", "declined"),
    [
        # Of a block: 16 ms to compute and half a second from the disk.
        (0, 1000.0, 1, 2),
        (BLOCK, 1000.0, 1, 2),
        (2 * BLOCK, 1000.0, 3, 0),
        (0, 10.0, 3, 0),
        (0, 1e9, 0, 3),
    ],
)
def test_what_is_computed_faster_is_not_fetched(
    loaded: LoadedModel, held: int, prefill_tokens_per_s: float, fetched: int, declined: int
) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store = PlainStore(loaded, MIXED)
        exchange = make_exchange(loaded, prefill_tokens_per_s=prefill_tokens_per_s)
        exchange.use_store(store.address())
        slow_disk(exchange.rates, 2 * loaded.layout.block_bytes)
        found = await exchange.find(REQUEST, None)
        if found is None:
            assert fetched == 0
        else:
            assert await exchange.fetch(found, [4, 9, 2, 7], held) == max(held, fetched * BLOCK)
            assert sorted(store.got) == [f"e{number}/0" for number in range(held // BLOCK, fetched)]
        counts = exchange.counts
        assert (counts.lookups, counts.queried_tokens, counts.declined_tokens) == (1, 3 * BLOCK, declined * BLOCK)
        assert counts.found_tokens == {"dram": 2 * BLOCK, "disk": BLOCK}
        hits = Counter(MIXED[number] for number in range(held // BLOCK, fetched))
        assert counts.hit_tokens == {tier: count * BLOCK for tier, count in hits.items()}
        await until(lambda: not store.leases)
        assert exchange._leases == set()
        assert exchange.misses == {}

    run(loaded, body)


def test_what_was_handed_over_is_fetched_however_slow_that_is(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store = PlainStore(loaded, MIXED)
        exchange = make_exchange(loaded, prefill_tokens_per_s=1e9)
        exchange.use_store(store.address())
        slow_disk(exchange.rates, 1000.0)
        without_tail = HandOver("r", len(PROMPT), None)
        found = await exchange.find(FOLLOW_UP, without_tail)
        assert found is not None
        assert await exchange.fetch(found, [4, 9, 2, 7], 0) == 3 * BLOCK
        assert exchange.counts.declined_tokens == 0
        assert exchange.counts.found_tokens == {"dram": 2 * BLOCK, "disk": BLOCK}
        assert exchange.counts.hit_tokens == {}  # those of its prompt were counted where it began

    run(loaded, body)


def test_only_what_lies_on_a_disk_and_is_worth_it_is_prefetched(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store = PlainStore(loaded, ("dram", "disk", "disk"))
        exchange.use_store(store.address())
        found = await exchange.find(REQUEST, None)
        assert found is not None
        await until(lambda: store.prefetched == ["e1/0", "e2/0"])
        assert store.got == []
        exchange.give_up(found)

        store.prefetched.clear()
        exchange = make_exchange(loaded, prefill_tokens_per_s=1000.0)
        exchange.use_store(store.address())
        slow_disk(exchange.rates, 1000.0)
        assert await exchange.find(REQUEST, None) is not None
        for _ in range(10):
            await asyncio.sleep(0)
        assert store.prefetched == []

    run(loaded, body)


@pytest.mark.parametrize(("trouble", "is_measured"), [(None, True), ("damage", False), ("silence", True)])
def test_a_fetch_that_came_or_timed_out_is_measured(
    loaded: LoadedModel, trouble: str | None, is_measured: bool
) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        before = exchange.rates.bytes_per_s()
        found = await exchange.find(REQUEST, None)
        assert found is not None
        if trouble == "damage":
            store.parts["e0/0"][-100] ^= 1
        elif trouble == "silence":
            store.answers.clear()
        await exchange.fetch(found, [4, 9, 2, 7], 0)
        now = exchange.rates.bytes_per_s()
        assert now["disk"] == before["disk"]
        assert (now["dram"] != before["dram"]) == is_measured

    run(loaded, body, timeout_s=0.2 if trouble == "silence" else 1000.0)


def test_a_request_that_wants_log_probabilities_of_its_prompt_looks_nothing_up(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        assert await exchange.find(EngineRequest("r", PROMPT, greedy(4, prompt_logprobs=1)), None) is None
        assert store.lookups == 0

    run(loaded, body)


@pytest.mark.parametrize("cancelled", [False, True], ids=["timed out", "cancelled"])
def test_a_lease_that_comes_too_late_is_ended(loaded: LoadedModel, cancelled: bool) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store.answers.clear()
        finding = asyncio.create_task(exchange.find(REQUEST, None))
        await until(lambda: store.lookups == 1)
        if cancelled:
            finding.cancel()
            await asyncio.wait({finding})
            assert finding.cancelled()
        else:
            assert await finding is None
            assert exchange.misses == {"timeout": 1}
        granted: list[set[int]] = []
        store.answers.set()
        await until(lambda: bool(granted.append(set(store.leases)) or granted[-1]))
        await until(lambda: not store.leases)

    run(loaded, body, timeout_s=1000.0 if cancelled else 0.01)


def test_a_directory_that_is_dead_is_a_miss(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store.fails = ActorDiedError()
        assert await exchange.find(REQUEST, None) is None
        await exchange.renew_leases()
        assert exchange.misses == {"actor_died": 1}

    run(loaded, body)


@pytest.mark.parametrize("trouble", ["prefix gone", "directory dead", "cancelled"])
def test_a_tail_that_cannot_be_used_is_freed(loaded: LoadedModel, trouble: str) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store.has_prefix = trouble != "prefix gone"
        store.fails = ActorDiedError() if trouble == "directory dead" else None
        if trouble == "cancelled":
            store.answers.clear()
        finding = asyncio.create_task(exchange.find(FOLLOW_UP, hand_over()))
        if trouble == "cancelled":
            await until(lambda: store.lookups == 1)
            finding.cancel()
        await asyncio.wait({finding})
        assert finding.cancelled() or finding.result() is None
        await until(lambda: not store.tails)

    run(loaded, body)


def test_what_is_not_fetched_after_all_is_given_back(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        found = await exchange.find(FOLLOW_UP, hand_over())
        assert found is not None
        assert found.num_tokens == len(PROMPT)
        exchange.give_up(found)
        await until(lambda: not store.leases and not store.tails)

    run(loaded, body)


@pytest.mark.parametrize("trouble", ["store dead", "part damaged", "cancelled"])
def test_a_fetch_that_fails_gives_everything_back(loaded: LoadedModel, trouble: str) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        found = await exchange.find(FOLLOW_UP, hand_over())
        assert found is not None
        if trouble == "part damaged":
            store.parts["e0/0"][-100] ^= 1
        elif trouble == "store dead":
            store.fails = ActorDiedError()
        else:
            store.answers.clear()
        fetching = asyncio.create_task(exchange.fetch(found, [4, 9, 2, 7], 0))
        if trouble == "cancelled":
            await asyncio.sleep(0)
            fetching.cancel()
        await asyncio.wait({fetching})
        assert fetching.cancelled() if trouble == "cancelled" else fetching.result() == 0
        await until(lambda: not store.leases and not store.tails)

    run(loaded, body)


def test_a_fetch_that_is_cancelled_again_and_again_ends_after_its_copy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, may_end, write = threading.Event(), threading.Event(), actors.kv_pages.write_pages
    is_copied = threading.Event()

    def slow_write(*arguments: Any) -> None:
        copying.set()
        assert may_end.wait(30)
        write(*arguments)
        is_copied.set()

    monkeypatch.setattr(actors.kv_pages, "write_pages", slow_write)

    async def body(exchange: KvExchange, store: PlainStore) -> None:
        found = await exchange.find(REQUEST, None)
        assert isinstance(found, FoundPrefix)
        fetching = asyncio.create_task(exchange.fetch(found, [4, 9, 2, 7], 0))
        await until(copying.is_set)
        for _ in range(3):
            fetching.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not fetching.done(), "its blocks would be given back while they are written"
        may_end.set()
        await asyncio.wait({fetching})
        assert fetching.cancelled()
        assert is_copied.is_set()
        await until(lambda: not store.leases)

    run(loaded, body)


def test_a_store_that_never_answers_is_given_up_on(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        store.answers.clear()
        assert await exchange.publish("worker", "r", store.keys, 3 * BLOCK) is None
        assert exchange.misses == {"timeout": 1}

    run(loaded, body, timeout_s=0.01)


def test_leases_that_the_directory_no_longer_knows_are_not_renewed_for_ever(loaded: LoadedModel) -> None:
    async def body(exchange: KvExchange, store: PlainStore) -> None:
        await exchange.find(REQUEST, None)
        await exchange.find(REQUEST, None)
        assert len(exchange._leases) == 2
        store.leases.discard(1)
        await exchange.renew_leases()
        assert exchange._leases == {2}

    run(loaded, body)


def test_without_a_store_there_is_nothing_to_find_and_nowhere_to_publish(loaded: LoadedModel) -> None:
    async def body(_: KvExchange, store: PlainStore) -> None:
        exchange = make_exchange(loaded)
        assert await exchange.find(FOLLOW_UP, hand_over()) is None
        assert await exchange.publish("worker", "r", store.keys, 3 * BLOCK) is None

    run(loaded, body)
