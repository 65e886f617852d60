"""What an ingress says of itself while workers come, stall, fall silent and go, and whom it asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from actors.addresses import RosterView
from actors.engine.request import FINISH_LENGTH
from app.api_keys import PUBLIC
from app.completion_protocol import CompletionRequest
from app.default_sampling import DefaultSampling
from app.frontend import Frontend
from app.openai_errors import ApiError
from app.settings import AppSettings
from tests.collected_spans import HOOK, collected
from tests.plain_worker import PlainWorker, until

NO_WORKERS = ["no prefill worker is ready", "no decode worker is ready"]


class PlainControl:
    """In the place of the control deployment's handle: lists the workers that the test says."""

    def __init__(self) -> None:
        self._version = 0
        self._view = RosterView(0, (), ())
        self._changed = asyncio.Event()

    @property
    def watch(self) -> PlainControl:
        return self

    suspect = watch

    def list_workers(self, *workers: PlainWorker, directory: Sequence[Any] = ()) -> None:
        self._view = RosterView(self._view.version + 1, tuple(worker.member() for worker in workers), tuple(directory))
        self._changed.set()
        self._changed = asyncio.Event()

    def remote(self, version: int, _: float) -> Awaitable[RosterView]:
        return asyncio.ensure_future(self._after(version))

    async def _after(self, version: int) -> RosterView:
        while self._view.version == version:
            await self._changed.wait()
        return self._view


class PlainDirectory:
    """Counts how often it is asked what is stored."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def match_blocks(self) -> PlainDirectory:
        return self

    async def remote(self, keys: bytes) -> int:
        self.asked += 1
        return 0


@asynccontextmanager
async def frontend_of(
    tokenizer: Any, stall_timeout_s: float = 1000.0, **settings_given: Any
) -> AsyncGenerator[tuple[Frontend, PlainControl]]:
    control = PlainControl()
    ingress = {"stall_timeout_s": stall_timeout_s, **settings_given.pop("ingress", {})}
    settings = AppSettings.model_validate({"mode": "static", "ingress": ingress, **settings_given})
    frontend = Frontend(settings, tokenizer, "tiny", control, DefaultSampling())
    try:
        yield frontend, control
    finally:
        await frontend.stop()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())


def test_until_every_role_has_a_worker_that_reported_nothing_is_served(byte_level_tokenizer: Any) -> None:
    async def body() -> None:
        async with frontend_of(byte_level_tokenizer, stall_timeout_s=1000.0) as (frontend, control):
            prefill, decode = PlainWorker("p", "prefill"), PlainWorker("d", "decode")
            assert frontend.health_problems() == NO_WORKERS
            request = CompletionRequest.model_validate({"model": "tiny", "prompt": "hi"})
            with pytest.raises(ApiError) as caught:
                frontend.generation(request, PUBLIC)
            assert caught.value.status == 503
            assert int(caught.value.headers()["Retry-After"]) >= 1
            control.list_workers(prefill)
            await until(lambda: frontend.health_problems() == NO_WORKERS[1:])
            control.list_workers(prefill, decode)
            await until(lambda: frontend.health_problems() == [])
            frontend.generation(request, PUBLIC)
            control.list_workers(decode)
            await until(lambda: frontend.health_problems() == NO_WORKERS[:1])
            control.list_workers()
            await until(lambda: frontend.health_problems() == NO_WORKERS)

    run(body)


def test_a_worker_with_work_that_does_no_step_is_named_until_it_does(byte_level_tokenizer: Any) -> None:
    async def body() -> None:
        # Plain workers report whenever the loop turns, so that half a second is many reports.
        async with frontend_of(byte_level_tokenizer, stall_timeout_s=0.5) as (frontend, control):
            prefill, decode = PlainWorker("p", "prefill"), PlainWorker("d", "decode")
            control.list_workers(prefill, decode)
            await until(lambda: frontend.health_problems() == [])
            decode.is_busy = True

            def named() -> list[str]:
                for worker in (prefill, decode):
                    worker.outbox.nudge()
                return [problem.split()[1] for problem in frontend.health_problems() if "no progress" in problem]

            await until(lambda: named() == ["d"])
            decode.steps += 1
            await until(lambda: named() == [])

    run(body)


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_directory_is_asked_what_is_stored_only_where_prefixes_are_shared(
    byte_level_tokenizer: Any, is_shared: bool
) -> None:
    async def body() -> None:
        store = {"share_prefixes": is_shared}
        async with frontend_of(byte_level_tokenizer, store=store) as (frontend, control):
            prefill, directory = PlainWorker("p", "prefill"), PlainDirectory()
            control.list_workers(prefill, PlainWorker("d", "decode"), directory=[directory])
            await until(lambda: frontend.health_problems() == [])
            request = CompletionRequest.model_validate({"model": "tiny", "prompt": list(range(3, 43))})
            async with aclosing(frontend.generation(request, PUBLIC).pieces()) as pieces:
                first = asyncio.ensure_future(anext(pieces))
                await until(lambda: bool(prefill.submitted))
                assert directory.asked == int(is_shared)
                first.cancel()
                await asyncio.wait({first})

    run(body)


def test_a_request_leaves_spans_where_tracing_is_set_up(byte_level_tokenizer: Any) -> None:
    async def body() -> None:
        settings = {"mode": "monolithic", "ingress": {"tracing": HOOK}}
        async with frontend_of(byte_level_tokenizer, **settings) as (frontend, control):
            worker = PlainWorker("w", "monolithic")
            control.list_workers(worker)
            await until(lambda: frontend.health_problems() == [])
            request = CompletionRequest.model_validate({"model": "tiny", "prompt": "a secret"})
            async with aclosing(frontend.generation(request, PUBLIC).pieces()) as pieces:
                first = asyncio.ensure_future(anext(pieces))
                await until(lambda: bool(worker.submitted))
                worker.give(65, FINISH_LENGTH, cached_tokens=0)
                assert (await first).finish_reason == "length"
            spans = collected()
            assert spans.keys() == {"request", "queue", "prefill", "decode"}
            attributes = spans["request"].attributes or {}
            assert attributes["gen_ai.usage.output_tokens"] == 1
            assert attributes["equipoise.finished_reason"] == "length"
            assert "secret" not in "".join(span.to_json() for span in spans.values())

    run(body)
