"""What is peculiar to chat requests; the common fields stand in test_request_parsing.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from app.chat_protocol import ChatCompletionRequest

Refused = Callable[[bytes, type[ChatCompletionRequest]], dict[str, Any]]
GOOD: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


BAD = [
    ({"messages": []}, "messages", "invalid_value", "at least one message"),
    ({"messages": None}, "messages", "invalid_type", "at least one message"),
    ({"messages": "hi"}, "messages", "invalid_type", "a string of 2 characters"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type", "a string of 2 characters. It must be an object."),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter", "'system', 'developer'"),
    (
        {"messages": [{"role": "robot", "content": "hi"}]},
        "messages[0].role",
        "invalid_value",
        "'robot'. It must be 'system'",
    ),
    (
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "missing_required_parameter",
        "a string or a list of text",
    ),
    (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content",
        "invalid_value",
        "null. It must be a string",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value", "5. It must be a string"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_value", "a list of text parts"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content", "invalid_value", "part 0 has no type"),
    (
        {
            "messages": [
                *GOOD["messages"],
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            ]
        },
        "messages[1].content",
        "invalid_value",
        "part 0 is 'image_url', not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        "messages[0].content",
        "invalid_value",
        "part 1 is 'input_audio', not supported",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "invalid_value", "part 0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content",
        "invalid_value",
        "part 0 is not",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "bold": True}]}]},
        "messages[0].content",
        "invalid_value",
        "part 0 is not",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "invalid_value",
        "(call 0 is not of a function)",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "audio": {"id": "1"}}]},
        "messages[0].audio",
        "invalid_value",
        "audio is not supported yet",
    ),
    ({"messages": [{"role": "user", "content": "", "mood": "good"}]}, "messages[0].mood", "unknown_parameter", "mood"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value", "give one, or the same"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value", "the answer may have 5 tokens"),
    ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value", "the answer may have 5 tokens"),
    ({"logprobs": 5}, "logprobs", "invalid_type", "true or false"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "from 0 to 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value", "from 0 to 20"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "invalid_type", "from 0 to 20"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value", "only allowed with 'logprobs': true"),
    ({"logprobs": False, "top_logprobs": 0}, "top_logprobs", "invalid_value", "only allowed with 'logprobs': true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type", "1. It"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "unknown_parameter", "usage"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "invalid_type", "true (the default) or false"),
    ({"continue_final_message": True}, "continue_final_message", "invalid_value", "not 'user'"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
        "cannot both be true",
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type", "an object of variables"),
    ({"functions": [{}]}, "functions", "unsupported_parameter", "not supported yet"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter", 'set it to "none".'),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter", "not supported yet"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter", "not supported yet"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter", "not supported yet"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter", "not supported yet"),
    ({"prompt": "hi"}, "prompt", "unknown_parameter", "Unrecognized request argument supplied: prompt"),
    ({"best_of": 1}, "best_of", "unknown_parameter", "Unrecognized request argument supplied: best_of"),
]


@pytest.mark.parametrize(("changes", "param", "code", "said"), BAD)
def test_bad_chat_requests(refused: Refused, changes: dict[str, Any], param: str, code: str, said: str) -> None:
    error = refused(json.dumps({**GOOD, **changes}).encode(), ChatCompletionRequest)
    assert (error["param"], error["code"]) == (param, code)
    assert said in error["message"]
