"""A worker's requests after their last token, over a real engine: what is published of answers, and what that costs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.grammar import Grammars
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, TokenEvent
from actors.engine_thread import EngineThread
from actors.fetch_rates import FetchRates
from actors.kv_exchange import KvExchange
from actors.messages import Submission
from actors.outbox import Outbox
from actors.request_tracker import GRAMMAR_LIMIT_S, RequestTracker
from tests.engine_driver import greedy, make_prompt
from tests.plain_store import BLOCK, PROMPT, PlainStore
from tests.reference import FAMILIES, make_model

POOL = 12
OWNER = "one"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(FAMILIES["llama"], tmp_path_factory.mktemp("model"))


class Run:
    """A decode worker without its actor, and a store that has nothing and takes over what it is given."""

    def __init__(self, folder: Path, limit: int, grammar_limit_s: float = GRAMMAR_LIMIT_S) -> None:
        config = EngineConfig(device="cpu", dtype="float32", kv_cache_blocks=POOL)
        self.engine = Engine(load_model(folder, config), config)
        self.store = PlainStore(self.engine.loaded)
        self.store.has_prefix = False
        rates = FetchRates(lambda: 1000.0, step_s=lambda: 0.0)
        exchange = KvExchange(self.engine.loaded, rates, lease_s=30.0, fetch_timeout_s=1000.0, publish_timeout_s=1000.0)
        exchange.use_store(self.store.address())
        self.outbox = Outbox()
        loop = asyncio.get_running_loop()

        def on_turn(_: Engine, result: StepResult) -> None:
            loop.call_soon_threadsafe(self.tracker.take_turn, result)

        self.thread = EngineThread(self.engine, on_turn, lambda: None)
        grammars = Grammars(folder, self.engine.loaded.spec.vocab_size, (0,))
        self.tracker = RequestTracker(
            self.thread,
            exchange,
            self.outbox,
            "worker",
            grammars,
            max_publishing_answers=limit,
            grammar_limit_s=grammar_limit_s,
        )

    async def answer(self, name: str, prompt_tokens: int, max_tokens: int) -> list[int]:
        """All tokens of a request."""
        self.tracker.submit(
            Submission(EngineRequest(name, make_prompt(prompt_tokens, 1), greedy(max_tokens), owner=OWNER))
        )
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            message = await self.outbox.collect(OWNER, 1.0)
            tokens += [e.token_id for e in message.events if e.request_id == name and e.token_id is not None]
        return tokens

    async def is_held(self, name: str) -> bool:
        return await asyncio.wrap_future(self.thread.call(lambda engine: engine.holds_export(name)))

    async def wait_free(self) -> None:
        while len(self.tracker) or await asyncio.wrap_future(self.thread.call(lambda engine: engine.blocks.num_live)):
            await asyncio.sleep(0.001)
        self.engine.check_idle()


def run(
    folder: Path, limit: int, body: Callable[[Run], Awaitable[None]], grammar_limit_s: float = GRAMMAR_LIMIT_S
) -> None:
    async def limited() -> None:
        run = Run(folder, limit, grammar_limit_s)
        try:
            async with asyncio.timeout(60):
                await body(run)
        finally:
            run.thread.stop()

    asyncio.run(limited())


@pytest.mark.parametrize(
    ("prompt", "answer", "blocks"), [(20, 12, 1), (20, 13, 2), (20, 14, 2), (3, 13, 0), (3, 14, 1)]
)
def test_the_full_blocks_of_prompt_and_answer_are_published_but_for_the_last_token(
    folder: Path, prompt: int, answer: int, blocks: int
) -> None:
    async def body(run: Run) -> None:
        tokens = await run.answer("a", prompt, answer)
        await run.wait_free()
        if blocks == 0:
            assert run.store.pulled == []
            return
        assert [(name, len(keys), num_tokens) for name, keys, num_tokens in run.store.pulled] == [
            ("a", blocks, blocks * BLOCK)
        ]
        assert run.store.pulled[0][1] == tuple(run.store.keys_of((*make_prompt(prompt, 1), *tokens)))[:blocks]
        assert run.tracker.counts["published_answer_blocks"] == 3  # as the store says
        assert run.tracker.counts["unpublished_answers"] == 0

    run(folder, 8, body)


def test_what_the_store_has_already_is_not_published_again(folder: Path) -> None:
    async def body(run: Run) -> None:
        run.store.has_prefix = True
        request = EngineRequest("a", PROMPT, greedy(5), owner=OWNER)  # to 57 tokens of KV: three full blocks
        run.tracker.submit(Submission(request))
        await run.wait_free()
        assert run.engine.counters.finished_requests == 1
        assert run.store.pulled == []

    run(folder, 8, body)


def test_clients_never_wait_for_a_store_and_answers_beyond_the_limit_are_not_published(folder: Path) -> None:
    async def body(run: Run) -> None:
        run.store.takes_over.clear()
        for name in ("a", "b", "c"):
            assert len(await run.answer(name, 20, 14)) == 14
        assert [await run.is_held(name) for name in ("a", "b", "c")] == [True, True, False]
        assert run.tracker.counts["unpublished_answers"] == 1
        run.tracker.abort("a")  # it has ended for its client: nothing of it is lost
        assert await run.is_held("a")
        run.store.takes_over.set()
        await run.wait_free()
        assert {name for name, _, _ in run.store.pulled} == {"a", "b"}
        assert run.tracker.counts["published_answer_blocks"] == 6

    run(folder, 2, body)


def test_a_request_that_needs_blocks_takes_those_of_answers_being_published(folder: Path) -> None:
    async def body(run: Run) -> None:
        run.store.takes_over.clear()
        alone = await run.answer("alone", 70, (POOL - 5) * BLOCK)
        assert await run.is_held("alone")
        assert await run.answer("again", 70, (POOL - 5) * BLOCK) == alone
        assert not await run.is_held("alone")
        run.store.takes_over.set()
        await run.wait_free()

    run(folder, 8, body)


def test_nothing_is_published_where_the_limit_is_zero(folder: Path) -> None:
    async def body(run: Run) -> None:
        await run.answer("a", 20, 14)
        await run.wait_free()
        assert run.store.pulled == []

    run(folder, 0, body)


@pytest.mark.parametrize(
    ("grammar", "limit_s", "said"),
    [("start: nothing", GRAMMAR_LIMIT_S, "unknown name"), ('start: "a"', 0.0, "took longer than 0 s")],
)
def test_a_grammar_that_cannot_be_used_ends_its_request_and_nothing_else(
    folder: Path, grammar: str, limit_s: float, said: str
) -> None:
    async def body(run: Run) -> None:
        sampling = replace(greedy(4), grammar=LLMatcher.grammar_from_lark(grammar))
        run.tracker.submit(Submission(EngineRequest("a", PROMPT, sampling, owner=OWNER)))
        events = list[TokenEvent]()
        while not events:
            events += (await run.outbox.collect(OWNER, 1.0)).events
        (event,) = events
        assert (event.finish_reason, event.blames_grammar) == ("error", True)
        assert said in (event.error or "")
        assert len(await run.answer("b", 20, 4)) == 4
        await run.wait_free()

    run(folder, 8, body, limit_s)
