from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs

from actors.engine.request import TokenLogprobs
from app.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from app.token_bytes import TokenBytes


@pytest.fixture
def table(byte_fallback_tokenizer: Any) -> TokenBytes:
    return TokenBytes(byte_fallback_tokenizer)


@pytest.fixture
def ids(byte_fallback_tokenizer: Any) -> dict[str, int]:
    names = {"the": "▁the", "a": "a", "half": "<0xE4>", "end": "</s>"}
    return {name: byte_fallback_tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def test_a_prompts_form(table: TokenBytes, ids: dict[str, int]) -> None:
    the, half, a = (str(ids[name]) for name in ("the", "half", "a"))
    positions = [
        None,
        TokenLogprobs(ids["the"], -0.5, ((ids["the"], -0.5), (ids["half"], -1.5))),
        TokenLogprobs(ids["a"], -math.inf, ((ids["the"], -0.25),)),
        TokenLogprobs(ids["a"], -2.0),
    ]
    assert prompt_logprobs(positions, table) == [
        None,
        {
            the: {"logprob": -0.5, "rank": 1, "decoded_token": " the"},
            half: {"logprob": -1.5, "rank": 2, "decoded_token": "bytes:\\xe4"},
        },
        {
            the: {"logprob": -0.25, "rank": 1, "decoded_token": " the"},
            a: {"logprob": -9999.0, "rank": None, "decoded_token": "a"},
        },
        {a: {"logprob": -2.0, "rank": None, "decoded_token": "a"}},
    ]


def test_the_chat_form(table: TokenBytes, ids: dict[str, int]) -> None:
    positions = [
        TokenLogprobs(ids["the"], -0.5, ((ids["the"], -0.5), (ids["half"], -1.5))),
        TokenLogprobs(ids["end"], -math.inf),
    ]
    got = chat_logprobs(positions, table)
    assert got == {
        "content": [
            {
                "token": " the",
                "logprob": -0.5,
                "bytes": [32, 116, 104, 101],
                "top_logprobs": [
                    {"token": " the", "logprob": -0.5, "bytes": [32, 116, 104, 101]},
                    {"token": "bytes:\\xe4", "logprob": -1.5, "bytes": [0xE4]},
                ],
            },
            {"token": "</s>", "logprob": -9999.0, "bytes": [60, 47, 115, 62], "top_logprobs": []},
        ],
        "refusal": None,
    }
    ChoiceLogprobs.model_validate_json(json.dumps(got, allow_nan=False))


def test_the_completion_form(table: TokenBytes, ids: dict[str, int]) -> None:
    """An echoed prompt's first token has no log-probability; the chosen token is always among the top ones."""
    positions = [
        None,
        TokenLogprobs(ids["a"], -3.0, ((ids["the"], -0.5), (ids["half"], -1.5))),
        TokenLogprobs(ids["the"], -0.25, ((ids["the"], -0.25),)),
        TokenLogprobs(ids["half"], -2.0),
    ]
    got = completion_logprobs([ids["the"], ids["a"], ids["the"], ids["half"]], positions, [0, 4, 5, 9], table)
    assert got == {
        "tokens": [" the", "a", " the", "bytes:\\xe4"],
        "token_logprobs": [None, -3.0, -0.25, -2.0],
        "top_logprobs": [
            None,
            {" the": -0.5, "bytes:\\xe4": -1.5, "a": -3.0},
            {" the": -0.25},
            {"bytes:\\xe4": -2.0},
        ],
        "text_offset": [0, 4, 5, 9],
    }
    ids_after_first, positions_after_first = [ids["a"], ids["the"], ids["half"]], positions[1:]
    answer = completion_logprobs(ids_after_first, positions_after_first, [4, 5, 9], table)
    Logprobs.model_validate_json(json.dumps(answer, allow_nan=False), strict=True)


def test_of_tokens_that_look_alike_the_likelier_one_is_shown(byte_fallback_tokenizer: Any, table: TokenBytes) -> None:
    letter, as_byte = byte_fallback_tokenizer.convert_tokens_to_ids(["a", "<0x61>"])
    position = TokenLogprobs(as_byte, -4.0, ((letter, -0.5), (as_byte, -4.0)))
    assert completion_logprobs([as_byte], [position], [0], table)["top_logprobs"] == [{"a": -0.5}]
