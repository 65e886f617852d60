"""Answers that keep to a format, by a model that is too small to do so by itself: with the official client, over
prefill and decode workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from tests.openai_app import OpenAIApp

pytestmark = [pytest.mark.cluster, pytest.mark.model]

IN_FLIGHT = 8


def schemas() -> Iterator[dict[str, Any]]:
    """Fifty, each over another mixture of JSON's types."""
    scalars: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "string", "maxLength": 12},
        {"type": "boolean"},
        {"enum": ["red", "green", "blue"]},
        {"type": "null"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"const": {"fixed": [1, 2]}},
        {"type": "number", "minimum": -1, "maximum": 1},
        {"type": "string", "format": "date"},
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["none"]}]},
    ]
    for index in range(50):
        first, second = scalars[index % 10], scalars[(index // 10 + index + 1) % 10]
        shape = index // 10
        inner: dict[str, Any] = {
            0: second,
            1: {"type": "array", "items": second, "minItems": 1, "maxItems": 3},
            2: {"type": "object", "properties": {"x": second}, "required": ["x"], "additionalProperties": False},
            3: {"$ref": "#/$defs/thing"},
            4: {"type": "array", "prefixItems": [first, second], "minItems": 2, "maxItems": 2, "items": False},
        }[shape]
        yield {
            "type": "object",
            "properties": {"first": first, "inner": inner},
            "required": ["first", "inner"],
            "additionalProperties": False,
            **({"$defs": {"thing": second}} if shape == 3 else {}),
        }


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_fifty_schemas_are_kept_to(openai_app: OpenAIApp) -> None:
    def answer(numbered: tuple[int, dict[str, Any]]) -> Any:
        number, schema = numbered
        answer = openai_app.chat(
            "Describe something.",
            response_format=json_schema(schema),
            max_tokens=160,
            temperature=number % 2,
            seed=number,
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", choice.message.content
        return json.loads(choice.message.content)

    given = list(schemas())
    assert len({json.dumps(schema, sort_keys=True) for schema in given}) == 50
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        answers = list(pool.map(answer, enumerate(given)))
    for schema, value in zip(given, answers, strict=True):
        jsonschema.validate(value, schema)


class City(BaseModel):
    name: str
    is_capital: bool


def test_the_clients_own_parsing(openai_app: OpenAIApp) -> None:
    answer = openai_app.client.chat.completions.parse(
        model=openai_app.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        response_format=City,
        max_tokens=100,
        temperature=0,
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def test_every_choice_and_a_stream_keep_to_it(openai_app: OpenAIApp) -> None:
    rules: dict[str, Any] = {"structured_outputs": {"regex": "[0-9]{3}(-[a-f]{2}){2}"}}
    options: dict[str, Any] = {"temperature": 1.0, "seed": 4, "n": 4, "max_tokens": 40, "extra_body": rules}
    whole = openai_app.client.completions.create(model=openai_app.model, prompt="Serial numbers:", **options)
    texts = [choice.text for choice in whole.choices]
    assert all(re.fullmatch(r"[0-9]{3}(-[a-f]{2}){2}", text) for text in texts)
    assert len(set(texts)) > 1
    streamed = [""] * 4
    for chunk in openai_app.client.completions.create(
        model=openai_app.model, prompt="Serial numbers:", stream=True, **options
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_a_schema_that_kills_whatever_compiles_it_is_refused(openai_app: OpenAIApp) -> None:
    definitions: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(5000)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d5000": {"type": "string"}}}
    messages = [{"role": "user", "content": "x"}]
    for schema in (chain, {"$ref": "#"}):
        for stream in (False, True):
            body = {"messages": messages, "response_format": json_schema(schema), "stream": stream}
            error = openai_app.post("/v1/chat/completions", body).error(400, "invalid_grammar")
            assert error["param"] == "response_format"
    tools = [{"type": "function", "function": {"name": "f", "parameters": chain}}]
    body = {"messages": messages, "tools": tools, "tool_choice": "required"}
    assert openai_app.post("/v1/chat/completions", body).error(400, "invalid_grammar")["param"] == "tools"
    (choice,) = openai_app.chat("x", response_format=json_schema({"enum": ["yes"]}), max_tokens=20).choices
    assert choice.message.content == '"yes"'


def test_what_is_cut_says_so(openai_app: OpenAIApp) -> None:
    schema = {"type": "string", "minLength": 200}
    (choice,) = openai_app.chat("Tell me all.", response_format=json_schema(schema), max_tokens=5).choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith('"')
