"""What is peculiar to completion requests; the common fields stand in test_request_parsing.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.completion_protocol import CompletionRequest

Refused = Callable[[bytes, type[CompletionRequest]], dict[str, Any]]
GOOD: dict[str, Any] = {"model": "tiny", "prompt": "hello"}


BAD = [
    ({"prompt": ""}, "prompt", "invalid_value", "item 0 is empty"),
    ({"prompt": []}, "prompt", "invalid_value", "(given 0)"),
    ({"prompt": [""]}, "prompt", "invalid_value", "item 0 is empty"),
    ({"prompt": [[]]}, "prompt", "invalid_value", "item 0 is empty"),
    ({"prompt": ["a", ""]}, "prompt", "invalid_value", "item 1 is empty"),
    ({"prompt": [[1], []]}, "prompt", "invalid_value", "item 1 is empty"),
    ({"prompt": None}, "prompt", "invalid_value", "null. It must be a string, a list of token ids"),
    ({"prompt": 5}, "prompt", "invalid_value", "5. It must be a string, a list of token ids"),
    ({"prompt": {}}, "prompt", "invalid_value", "a string, a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_value", "item 0 is neither"),
    ({"prompt": [True]}, "prompt", "invalid_value", "item 0 is neither"),
    ({"prompt": [1.0]}, "prompt", "invalid_value", "item 0 is neither"),
    ({"prompt": [[[1]]]}, "prompt", "invalid_value", "item 0 is neither"),
    ({"prompt": [None]}, "prompt", "invalid_value", "item 0 is neither"),
    ({"prompt": [5, -1]}, "prompt", "invalid_value", "the negative token id -1"),
    ({"prompt": [[5], [-(10**4000)]]}, "prompt", "invalid_value", "item 1 has the negative token id an integer of"),
    ({"prompt": ["a"] * 65}, "prompt", "invalid_value", "(given 65)"),
    ({"prompt": ["a"] * 64, "n": 5}, "n", "invalid_value", "make 320 sequences; at most 256"),
    ({"logprobs": True}, "logprobs", "invalid_type", "from 0 to 20"),
    ({"logprobs": 21}, "logprobs", "invalid_value", "from 0 to 20"),
    ({"logprobs": -1}, "logprobs", "invalid_value", "from 0 to 20"),
    ({"echo": "yes"}, "echo", "invalid_type", "true or false"),
    ({"max_tokens": 0, "echo": False}, "max_tokens", "invalid_value", "only allowed with 'echo': true"),
    ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens", "invalid_value", "the answer may have 0 tokens"),
    ({"prompt_logprobs": 1, "logprobs": 2, "echo": True}, "prompt_logprobs", "invalid_value", "Give the same number"),
    ({"best_of": 2}, "best_of", "unsupported_parameter", "other than 'n' (1)"),
    ({"best_of": 3, "n": 2}, "best_of", "unsupported_parameter", "other than 'n' (2)"),
    ({"best_of": "2"}, "best_of", "invalid_type", "the same as 'n'"),
    ({"suffix": "end"}, "suffix", "unsupported_parameter", "not supported yet"),
    ({"messages": []}, "messages", "unknown_parameter", "Unrecognized request argument supplied: messages"),
]


@pytest.mark.parametrize(("changes", "param", "code", "said"), BAD, ids=lambda value: str(value)[:40])
def test_bad_completion_requests(refused: Refused, changes: dict[str, Any], param: str, code: str, said: str) -> None:
    error = refused(json.dumps({**GOOD, **changes}).encode(), CompletionRequest)
    assert (error["param"], error["code"]) == (param, code)
    assert said in error["message"]
