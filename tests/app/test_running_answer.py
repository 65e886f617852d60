"""How an answer that does not come to its end is counted and told, over sequences that fail as they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any

import pytest

from actors.engine.request import FINISH_LENGTH, EngineRequest, SamplingParams, TokenEvent
from app.choice_text import ChoiceText
from app.completion_protocol import CompletionRequest
from app.dispatcher import RefusedError
from app.generation import Choice, Generation
from app.openai_errors import ApiError, invalid_request, over_key_limit
from app.request_metrics import RequestMetrics
from app.running_answer import RunningAnswer
from app.sequence_flow import GrammarFailedError, RequestFailedError
from app.token_bytes import TokenBytes
from kv.metrics import table
from migrate.admission import Decision, RejectReason, Verdict
from migrate.view import NoWorkerError

FULL = Decision(Verdict.REJECT, reason=RejectReason.QUEUE_FULL, detail="many wait", retry_after_s=2.0)


class Flow:
    """Gives tokens, then raises `error`, or waits for ever, or ends where there is none."""

    def __init__(self, tokens: int, error: Exception | str | None) -> None:
        self._tokens = tokens
        self._error = error

    async def events(self) -> AsyncGenerator[TokenEvent]:
        for position in range(self._tokens):
            is_last = self._error is None and position == self._tokens - 1
            cached = None if position else 0
            yield TokenEvent("r", 65, FINISH_LENGTH if is_last else None, cached_tokens=cached)
        if isinstance(self._error, Exception):
            raise self._error
        if self._error is not None:
            await asyncio.Event().wait()


@contextmanager
def no_more() -> Iterator[None]:
    raise over_key_limit("3 at a time", retry_after_s=1.0)
    yield


class Setup:
    """One prompt of four tokens with `choices` choices, each of them a `Flow` of these arguments."""

    def __init__(
        self,
        tokenizer: Any,
        tokens: int,
        error: Exception | str | None,
        *,
        choices: int = 1,
        timeout_s: float = 600.0,
        hold: AbstractContextManager[None] | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.metrics, table = RequestMetrics("m"), TokenBytes(tokenizer)
        request = EngineRequest("r", (1, 2, 3, 4), SamplingParams(max_tokens=9))
        group = [
            Choice(
                request,
                ChoiceText(
                    index,
                    table,
                    (),
                    include_stop=False,
                    skip_special_tokens=True,
                    echoed_prompt=None,
                    after_text=False,
                ),
            )
            for index in range(choices)
        ]

        self.started = 0

        def start(_: Choice, admitted: asyncio.Event) -> Any:
            self.started += 1
            admitted.set()
            return Flow(tokens, error)

        generation = Generation([group], start, self.metrics, check=check)
        body = CompletionRequest(model="m", prompt="abcd")
        self.answer = RunningAnswer(body, generation, "m", timeout_s, lambda: hold or nullcontext())

    @property
    def counted(self) -> dict[str, float]:
        readings = self.metrics.readings(queued=0, inflight=0)
        return {tags[-1]: count for (metric, tags), count in readings.items() if metric is table.REQUESTS}

    @property
    def tokens(self) -> tuple[float, float]:
        readings = self.metrics.readings(queued=0, inflight=0)
        return readings[table.PROMPT_TOKENS, ("m",)], readings[table.GENERATION_TOKENS, ("m",)]


def test_what_ends_is_counted_by_its_end(byte_level_tokenizer: Any) -> None:
    setup = Setup(byte_level_tokenizer, 3, None, choices=2)
    assert len(asyncio.run(setup.answer.whole())) == 2
    assert (setup.counted, setup.tokens) == ({"length": 2}, (4, 6))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RefusedError(FULL), 429, "refused"),
        (NoWorkerError("none is alive"), 503, "refused"),
        (RequestFailedError("out of memory"), 500, "error"),
        (GrammarFailedError("too many items"), 400, "refused"),
    ],
)
def test_a_failure_counts_every_choice_once(
    byte_level_tokenizer: Any, error: Exception, status: int, reason: str
) -> None:
    setup = Setup(byte_level_tokenizer, 0, error, choices=3)
    with pytest.raises(ApiError) as raised:
        asyncio.run(setup.answer.whole())
    assert raised.value.status == status
    assert (setup.counted, setup.tokens) == ({reason: 3}, (0, 0))


def test_a_defect_counts_as_an_error(byte_level_tokenizer: Any) -> None:
    setup = Setup(byte_level_tokenizer, 2, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(setup.answer.whole())
    assert (setup.counted, setup.tokens) == ({"error": 1}, (4, 2))


def test_a_key_over_its_limit_counts_as_refused(byte_level_tokenizer: Any) -> None:
    setup = Setup(byte_level_tokenizer, 2, None, hold=no_more())
    with pytest.raises(ApiError, match="3 at a time"):
        asyncio.run(setup.answer.whole())
    assert setup.counted == {"refused": 1}


def test_what_is_checked_first_is_checked_for_keys_within_their_limits(byte_level_tokenizer: Any) -> None:
    checks = 0

    async def check() -> None:
        nonlocal checks
        checks += 1
        raise invalid_request("no grammar")

    for hold, said, expected in ((no_more(), "3 at a time", 0), (None, "no grammar", 1)):
        setup = Setup(byte_level_tokenizer, 2, None, hold=hold, check=check)
        with pytest.raises(ApiError, match=said):
            asyncio.run(setup.answer.whole())
        assert (setup.counted, setup.started, checks) == ({"refused": 1}, 0, expected)


def test_a_time_limit_is_told_from_a_client_that_left(byte_level_tokenizer: Any) -> None:
    setup = Setup(byte_level_tokenizer, 1, "waits", timeout_s=0.05)
    with pytest.raises(ApiError, match=r"0\.05 s"):
        asyncio.run(setup.answer.whole())
    assert (setup.counted, setup.tokens) == ({"timeout": 1}, (4, 1))

    setup = Setup(byte_level_tokenizer, 3, "waits", choices=2)

    async def leave() -> None:
        async with aclosing(setup.answer.pieces()) as pieces:
            await anext(pieces)

    asyncio.run(leave())
    assert setup.counted == {"abort": 2}
