"""`Generation` over sequences that are told when to go on, without workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.engine.request import FINISH_LENGTH, EngineRequest, SamplingParams, TokenEvent
from app.choice_text import ChoiceText, Piece
from app.generation import Choice, Generation
from app.request_metrics import RequestMetrics
from app.token_bytes import TokenBytes
from kv.metrics import table

LIMIT_S = 20.0
COUNTED = (table.PROMPT_TOKENS, table.GENERATION_TOKENS, table.REQUESTS)


class BrokenError(Exception):
    pass


@dataclass
class ScriptedFlow:
    """One sequence's flow: gives an event for each token once `go` says so, and fails at the token None."""

    request: EngineRequest
    tokens: Sequence[int | None]
    cached_tokens: int
    admitted: asyncio.Event
    is_admitted: asyncio.Event
    """Set by the test when this one may be."""
    go: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    began: bool = False
    ended: bool = False

    async def events(self) -> AsyncGenerator[TokenEvent]:
        self.began = True
        try:
            await self.is_admitted.wait()
            self.admitted.set()
            for position, token in enumerate(self.tokens):
                await self.go.acquire()
                if token is None:
                    raise BrokenError(self.request.request_id)
                yield TokenEvent(
                    self.request.request_id,
                    token,
                    FINISH_LENGTH if position == len(self.tokens) - 1 else None,
                    cached_tokens=None if position else self.cached_tokens,
                )
        finally:
            self.ended = True


class Run:
    """A generation of `prompts`, each given as its choices' tokens, and its sequences by request id."""

    def __init__(self, tokenizer: Any, prompts: Sequence[Sequence[Sequence[int | None]]], stop: str = "") -> None:
        self.sequences: dict[str, ScriptedFlow] = {}
        self.room = asyncio.Event()
        self.room.set()
        table, index, groups = TokenBytes(tokenizer), 0, []
        self._tokens: dict[str, Sequence[int | None]] = {}
        for number, choices in enumerate(prompts):
            group = []
            for choice_index, tokens in enumerate(choices):
                request_id = f"{number}.{choice_index}"
                self._tokens[request_id] = tokens
                prompt = tuple(range(10 * (number + 1)))
                request = EngineRequest(request_id, prompt, SamplingParams(max_tokens=len(tokens)))
                text = ChoiceText(
                    index,
                    table,
                    [stop] if stop else [],
                    include_stop=False,
                    skip_special_tokens=True,
                    echoed_prompt=None,
                    after_text=False,
                )
                group.append(Choice(request, text))
                index += 1
            groups.append(group)
        self.metrics = RequestMetrics("m")
        self.generation = Generation(groups, self._start, self.metrics)  # type: ignore[arg-type]

    def _start(self, choice: Choice, admitted: asyncio.Event) -> ScriptedFlow:
        request = choice.request
        cached = 4 if request.request_id.endswith(".0") else 9
        sequence = ScriptedFlow(request, self._tokens[request.request_id], cached, admitted, self.room)
        self.sequences[request.request_id] = sequence
        return sequence

    @property
    def began(self) -> set[str]:
        return {request_id for request_id, sequence in self.sequences.items() if sequence.began}

    @property
    def running(self) -> set[str]:
        return {request_id for request_id in self.began if not self.sequences[request_id].ended}

    def release(self, request_id: str, count: int = 1) -> None:
        for _ in range(count):
            self.sequences[request_id].go.release()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, LIMIT_S))


async def settle() -> None:
    """Lets every task run until it waits: with a sequence there is no more than a handful of steps to its wait."""
    for _ in range(50):
        await asyncio.sleep(0)


def test_choices_wait_for_the_first_token_of_their_prompt(byte_level_tokenizer: Any) -> None:
    ids = byte_level_tokenizer.encode("the fox")
    prompts = [[ids, ids, ids], [ids, ids]]

    async def main() -> None:
        run = Run(byte_level_tokenizer, prompts)
        async with aclosing(run.generation.pieces()) as pieces:
            first = asyncio.ensure_future(anext(pieces))
            await settle()
            assert run.began == {"0.0", "1.0"}
            run.release("1.0")
            piece = await first
            assert (piece.index, piece.token_ids) == (3, [ids[0]])
            await settle()
            assert run.began == {"0.0", "1.0", "1.1"}
            run.release("0.0")
            await anext(pieces)
            await settle()
            assert run.began == {"0.0", "0.1", "0.2", "1.0", "1.1"}
            for request_id in run.began:
                run.release(request_id, len(ids))
            texts = [""] * 5
            ended = []
            async for piece in pieces:
                texts[piece.index] += piece.text
                if piece.finish_reason:
                    ended.append(piece.index)
        assert sorted(ended) == [0, 1, 2, 3, 4]
        assert texts[1:3] + texts[4:] == ["the fox"] * 3  # the others had given pieces before
        assert run.running == set()

    run(main())


def test_other_prompts_wait_until_the_request_is_admitted(byte_level_tokenizer: Any) -> None:
    ids = byte_level_tokenizer.encode("the fox")

    async def main() -> None:
        run = Run(byte_level_tokenizer, [[ids, ids], [ids], [ids]])
        run.room.clear()
        pieces = asyncio.ensure_future(collect(run.generation))
        await settle()
        assert run.began == {"0.0"}
        run.room.set()
        await settle()
        assert run.began == {"0.0", "1.0", "2.0"}
        pieces.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pieces
        assert run.running == set()

    run(main())


def test_usage_counts_a_prompt_once_and_every_choices_tokens(byte_level_tokenizer: Any) -> None:
    ids = byte_level_tokenizer.encode("the fox")
    prompts = [[ids, ids[:2]], [ids[:3], ids[:1]]]

    async def main() -> None:
        run = Run(byte_level_tokenizer, prompts)
        pieces = asyncio.ensure_future(collect(run.generation))
        while not pieces.done():
            await settle()
            for request_id in run.running:
                run.release(request_id)
        texts = {}
        for piece in await pieces:
            texts[piece.index] = texts.get(piece.index, "") + piece.text
        assert texts == {n: byte_level_tokenizer.decode(t) for n, t in enumerate([*prompts[0], *prompts[1]])}
        usage = run.generation.usage()
        # Prompts of 10 and 20 tokens; the choices after the first find all of their prompt cached, which says nothing.
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (30, len(ids) + 2 + 3 + 1)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
        assert counted(run.metrics) == {"prompt": 30, "generated": len(ids) + 6, "length": 4}

    run(main())


def counted(metrics: RequestMetrics) -> dict[str, float]:
    """Tokens, and choices by how they ended."""
    names = {table.PROMPT_TOKENS: "prompt", table.GENERATION_TOKENS: "generated"}
    readings = metrics.readings(queued=0, inflight=0)
    return {names.get(metric, tags[-1]): n for (metric, tags), n in readings.items() if metric in COUNTED}


async def collect(generation: Generation) -> list[Piece]:
    async with aclosing(generation.pieces()) as pieces:
        return [piece async for piece in pieces]


@pytest.mark.parametrize("broken", ["0.0", "0.1", "1.0"])
def test_when_one_choice_fails_the_others_end(byte_level_tokenizer: Any, broken: str) -> None:
    ids = byte_level_tokenizer.encode("the fox")
    prompts = [[[*ids], [*ids], [*ids]], [[*ids], [*ids]]]
    number, choice_index = map(int, broken.split("."))
    prompts[number][choice_index][1] = None  # type: ignore[call-overload]

    async def main() -> None:
        run = Run(byte_level_tokenizer, prompts)
        pieces = asyncio.ensure_future(collect(run.generation))
        await settle()
        run.release("0.0")
        run.release("1.0")
        await settle()
        assert run.running == {"0.0", "0.1", "0.2", "1.0", "1.1"}
        run.release(broken, 2)
        with pytest.raises(BrokenError, match=broken):
            await pieces
        assert run.running == set()

    run(main())


@pytest.mark.parametrize("choices", [1, 3])
def test_leaving_early_ends_every_sequence(byte_level_tokenizer: Any, choices: int) -> None:
    ids = byte_level_tokenizer.encode("the fox")

    async def main() -> None:
        run = Run(byte_level_tokenizer, [[ids] * choices])
        pieces = run.generation.pieces()
        first = asyncio.ensure_future(anext(pieces))
        await settle()
        run.release("0.0")
        await first
        await settle()
        assert len(run.running) == choices
        await pieces.aclose()
        assert run.running == set()

    run(main())


@pytest.mark.parametrize("choices", [1, 2])
def test_cancelling_before_the_first_token_ends_every_sequence(byte_level_tokenizer: Any, choices: int) -> None:
    ids = byte_level_tokenizer.encode("the fox")

    async def main() -> None:
        run = Run(byte_level_tokenizer, [[ids] * choices, [ids]][: 1 if choices == 1 else 2])
        pieces = asyncio.ensure_future(collect(run.generation))
        await settle()
        assert run.running
        pieces.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pieces
        assert run.running == set()

    run(main())


@pytest.mark.parametrize("choices", [1, 2])
def test_a_stop_string_ends_its_own_sequence(byte_level_tokenizer: Any, choices: int) -> None:
    ids = byte_level_tokenizer.encode("the fox jumps")

    async def main() -> None:
        run = Run(byte_level_tokenizer, [[ids] * choices], stop=" fox")
        pieces = asyncio.ensure_future(collect(run.generation))
        while not pieces.done():
            await settle()
            for request_id in run.running:
                run.release(request_id)
        got = await pieces
        assert "".join(piece.text for piece in got if piece.index == 0) == "the"
        assert [piece.finish_reason for piece in got if piece.finish_reason] == ["stop"] * choices
        assert run.running == set()
        assert run.generation.usage()["completion_tokens"] < choices * len(ids)

    run(main())
