"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.engine.request import TokenLogprobs
from app.token_bytes import TokenBytes

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity (a token that a mask rules out), which JSON can't say. OpenAI's value."""


def chat_logprobs(positions: Sequence[TokenLogprobs], table: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a chat. `token` is a string of the token's own (`TokenBytes.text`), `bytes` are exact."""
    return {
        "content": [
            {
                **_chat_entry(position.token_id, position.logprob, table),
                "top_logprobs": [_chat_entry(token_id, logprob, table) for token_id, logprob in position.top],
            }
            for position in positions
        ],
        "refusal": None,
    }


def _chat_entry(token_id: int, logprob: float, table: TokenBytes) -> dict[str, Any]:
    return {"token": table.text(token_id), "logprob": _finite(logprob), "bytes": list(table.of(token_id))}


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    text_offsets: Sequence[int],
    table: TokenBytes,
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion, for consecutive tokens.

    `positions` has None where there is no log-probability: an echoed prompt's first token. `text_offsets` are in
    characters of the choice's text: how much text the tokens before each one gave. The top tokens of a position include
    the chosen one, so there may be one more than was asked for; tokens that look alike are one entry, the likelier one.
    """
    return {
        "tokens": [table.text(token_id) for token_id in token_ids],
        "token_logprobs": [None if position is None else _finite(position.logprob) for position in positions],
        "top_logprobs": [None if position is None else _top_by_text(position, table) for position in positions],
        "text_offset": list(text_offsets),
    }


def prompt_logprobs(
    positions: Sequence[TokenLogprobs | None], table: TokenBytes
) -> list[dict[str, dict[str, Any]] | None]:
    """The prompt's, in vLLM's form: by token id, the most likely tokens and the prompt's own. A `rank` counts from 1;
    that of a token which is none of the most likely is not known."""
    return [None if position is None else _by_token_id(position, table) for position in positions]


def _by_token_id(position: TokenLogprobs, table: TokenBytes) -> dict[str, dict[str, Any]]:
    entries = {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": table.text(token_id)}
        for rank, (token_id, logprob) in enumerate(position.top, start=1)
    }
    own = {"logprob": _finite(position.logprob), "rank": None, "decoded_token": table.text(position.token_id)}
    return {**entries, str(position.token_id): entries.get(str(position.token_id), own)}


def _top_by_text(position: TokenLogprobs, table: TokenBytes) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
        top.setdefault(table.text(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
