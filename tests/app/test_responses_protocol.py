"""Requests of /v1/responses, and the chats they are."""

from __future__ import annotations

from typing import Any

import pytest

from app.openai_errors import ApiError
from app.request_parsing import validate_request
from app.responses_protocol import ResponsesRequest
from app.structured_output import response_format_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def request(**fields: Any) -> ResponsesRequest:
    return validate_request({"model": "m", "input": "hi", **fields}, ResponsesRequest)


def messages_of(given: ResponsesRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in given.as_chat().messages]


def test_a_text_is_a_users_message() -> None:
    assert messages_of(request()) == [("user", "hi")]
    assert messages_of(request(input="")) == [("user", "")]
    assert messages_of(request(instructions="Be kind.")) == [("system", "Be kind."), ("user", "hi")]


def test_messages_and_an_answer_that_is_sent_back() -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}],
    }
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    given = request(input=[{"role": "developer", "content": "Be kind."}, answer, {"role": "user", "content": parts}])
    assert messages_of(given) == [("developer", "Be kind."), ("assistant", "Hello."), ("user", "one\ntwo")]


def test_the_other_fields() -> None:
    chat = request(
        max_output_tokens=5, temperature=0.5, top_p=0.9, stream=True, store=True, metadata={"a": "b"}
    ).as_chat()
    assert (chat.max_new_tokens, chat.temperature, chat.top_p, chat.stream) == (5, 0.5, 0.9, True)
    assert chat.grammar is None
    assert request(text={"format": {"type": "text"}}).as_chat().grammar is None
    schema = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    in_a_chat = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert request(text={"format": schema}).as_chat().grammar is not None
    assert request(text={"format": schema}).as_chat().grammar == response_format_grammar(in_a_chat)
    assert request(text={"format": {"type": "json_object"}}).as_chat().grammar == response_format_grammar(
        {"type": "json_object"}
    )


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "a list of messages"),
        ({"input": 5}, "input", "a list of messages"),
        ({"input": None}, "input", "a list of messages"),
        ({"input": ["hi"]}, "input", "(item 0 is none; only texts are supported)"),
        ({"input": [{"role": "user", "content": []}]}, "input", "(item 0 is none"),
        ({"input": [{"role": "wizard", "content": "hi"}]}, "input", "(item 0 is none"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "(item 0 is none"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
            "input",
            "(item 0 is none",
        ),
        ({"instructions": 5}, "instructions", "It must be a string"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": 3}, "temperature", "from 0 to 2"),
        ({"text": {"format": {"type": "xml"}}}, "text", "It must be an object with the"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text", "the schema is no object"),
        ({"text": {"verbosity": "high"}}, "text", 'an object {"format": ...}'),
        ({"tools": [{"type": "web_search"}]}, "tools", "not supported yet"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported yet"),
        ({"messages": []}, "messages", "Unrecognized request argument supplied: messages"),
        ({"n": 2}, "n", "Unrecognized request argument supplied: n"),
    ],
)
def test_bad_requests(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        request(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message


def test_errors_never_quote_the_input() -> None:
    for fields in ({"input": [{"role": "user", "content": "SECRET", "type": 5}]}, {"input": {"SECRET": "SECRET"}}):
        with pytest.raises(ApiError) as caught:
            request(**fields)
        assert "SECRET" not in caught.value.message
