"""Pieces of an answer as gRPC messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from actors.engine.request import TokenLogprobs as Position
from app.choice_text import Piece
from app.grpc_api.inference_pb2 import (
    Choice,
    GenerateChunk,
    GenerateResponse,
    TokenLogprob,
    TokenLogprobs,
    ToolCall,
    Usage,
)
from app.openai_responses import AnswerHead
from app.running_answer import RunningAnswer
from app.spoken_answer import SpokenAnswer, gathered
from app.token_bytes import TokenBytes
from app.tool_call_parser import ToolCallDelta


async def whole_response(answer: RunningAnswer, table: TokenBytes) -> GenerateResponse:
    """The answer in one message. Raises ApiError."""
    choices = []
    for piece in await answer.whole():
        choice, calls = _choice(piece, SpokenAnswer(answer.tools), table, answer.wants_logprobs)
        for index, call in enumerate(gathered(calls)):
            choice.tool_calls.append(ToolCall(index=index, id=call["id"], **call["function"]))
        choices.append(choice)
    return GenerateResponse(**_head(answer.head), choices=choices, usage=_usage(answer.usage()))


async def chunks(answer: RunningAnswer, table: TokenBytes) -> AsyncGenerator[GenerateChunk]:
    """A chunk for whatever a step adds to a choice, then one with the usage. Raises ApiError. Leaving it early frees
    what the request holds."""
    head = _head(answer.head)
    spoken: defaultdict[int, SpokenAnswer] = defaultdict(lambda: SpokenAnswer(answer.tools))
    async with aclosing(answer.pieces()) as pieces:
        async for piece in pieces:
            choice, calls = _choice(piece, spoken[piece.index], table, answer.wants_logprobs)
            for call in calls:
                part = ToolCall(index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments)
                choice.tool_calls.append(part)
            yield GenerateChunk(**head, choice=choice)
    yield GenerateChunk(**head, usage=_usage(answer.usage()))


def _head(head: AnswerHead) -> dict[str, Any]:
    return {"id": head.id, "created": head.created, "model": head.model}


def _choice(
    piece: Piece, spoken: SpokenAnswer, table: TokenBytes, wants_logprobs: bool
) -> tuple[Choice, list[ToolCallDelta]]:
    """A piece without what it adds to calls, and that."""
    text, calls = spoken.take(piece)
    choice = Choice(
        index=piece.index,
        text=text,
        token_ids=piece.token_ids,
        logprobs=_logprobs(piece.logprobs, table) if wants_logprobs else (),
        finish_reason="" if piece.finish_reason is None else spoken.reason(piece.finish_reason),
    )
    return choice, calls


def _logprobs(positions: Iterable[Position | None], table: TokenBytes) -> list[TokenLogprobs]:
    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return TokenLogprob(token_id=token_id, logprob=logprob, token=table.of(token_id))

    return [
        TokenLogprobs(chosen=entry(position.token_id, position.logprob), top=[entry(*pair) for pair in position.top])
        for position in positions
        if position is not None
    ]


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )
