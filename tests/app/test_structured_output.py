"""What an answer is to keep to, as requests say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from actors.random_model import byte_tokenizer
from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.openai_errors import ApiError
from app.request_parsing import validate_request

TOKENIZER = byte_tokenizer()
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def chat(**fields: Any) -> ChatCompletionRequest:
    return validate_request(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatCompletionRequest
    )


def accepts(request: ChatCompletionRequest | CompletionRequest, text: str) -> bool:
    """Whether a whole answer keeps to it."""
    assert request.grammar is not None
    matcher = LLMatcher(from_tokenizer(TOKENIZER), request.grammar)
    assert not matcher.is_error(), matcher.get_error()
    return (
        all(matcher.consume_token(token) for token in TOKENIZER.encode(text, add_special_tokens=False))
        and matcher.is_accepting()
    )


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_text_is_free(given: Any) -> None:
    assert chat(response_format=given).grammar is None


def test_a_json_object_is_any_object() -> None:
    request = chat(response_format={"type": "json_object"})
    for value in ({}, {"a": [1, -2.5e3, None, {"b": "ü\n"}]}):
        assert accepts(request, json.dumps(value, ensure_ascii=False))
    for text in ("[]", "1", "{", '{"a": 1} ', '{ "a": 1}', '{"a":1}', "{'a': 1}"):
        assert not accepts(request, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_schema(fields: dict[str, Any]) -> None:
    request = chat(**fields)
    assert accepts(request, '{"a": 12}')
    for text in ("{}", '{"a": "x"}', '{"a": 1, "b": 2}', '{"a": 1.5}'):
        assert not accepts(request, text)


@pytest.mark.parametrize(
    ("rule", "members", "others"),
    [
        ({"regex": "[ab]{2,3}"}, ["ab", "bba"], ["a", "abab", "cc", ""]),
        ({"choice": ["yes", 'it is "no"', "\\n"]}, ["yes", 'it is "no"', "\\n"], ["ye", "yesno", "no", "\n"]),
        ({"grammar": 'start: "<" start? ">"'}, ["<>", "<<>>"], ["", "<", "<>>"]),
    ],
)
def test_vllms_rules(rule: dict[str, Any], members: list[str], others: list[str]) -> None:
    document = {"model": "m", "prompt": "p", "structured_outputs": rule}
    request = validate_request(document, CompletionRequest)
    assert [accepts(request, text) for text in members] == [True] * len(members)
    assert [accepts(request, text) for text in others] == [False] * len(others)


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": "json"}, "response_format", "It must be an object with the"),
        ({"response_format": {"type": "xml"}}, "response_format", "It must be an object with the"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "It must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "It must be"),
        (schema_of("x"), "response_format", "the schema is no object"),
        (schema_of({"const": "x" * 300_000}), "response_format", "at most 262144 are allowed"),
        (schema_of({"minimum": -(10**30)}), "response_format", "no integers of more than 64 bits"),
        (
            {"structured_outputs": {"json": {"maximum": 1 << 64}}},
            "structured_outputs",
            "no integers of more than 64 bits",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "(" * 2_000_000}}, "structured_outputs", "at most 262144 are allowed"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "the regex is no string, or empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 1000 strings"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "1 to 1000 strings"),
        ({"structured_outputs": {"grammar": "start: A\nA: /a/ & /b/"}}, "structured_outputs", "'&' and '~'"),
        ({"structured_outputs": {"grammar": 'start: A\nA: "\\"" ~/b/'}}, "structured_outputs", "'&' and '~'"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs", "exactly one of"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "both",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "ends where its format does"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(
    ("grammar", "member"),
    [
        ('start: "a & b" /[&~]/ # & as text\n// ~ in a comment', "a & b~"),
        ('start: %json {"const": "a \\" & // b"}', '"a \\" & // b"'),
        ("start: /\\/&/", "/&"),
    ],
)
def test_signs_of_operators_may_stand_in_texts(grammar: str, member: str) -> None:
    assert accepts(chat(structured_outputs={"grammar": grammar}), member)
