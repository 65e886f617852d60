"""openapi.json without a server: it is one, it has the requests' own fields, and it allows what is allowed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, Field, ValidationError

from app.api_description import reads
from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.ingress import http
from app.moves_desk import MoveOrder
from app.openai_errors import ApiError, overloaded
from app.responses_protocol import ResponsesRequest
from app.tokenize_protocol import DetokenizeBody, TokenizeBody

DOCUMENT: dict[str, Any] = get_openapi(title="x", version="1", routes=http.routes)
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/debug/moves": MoveOrder,
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": "m", "prompt": "Hello"}
MOVE = {"instance": "a", "layers": [1, 2], "source": "a", "destination": "b"}
ALLOWED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}),
    ("/v1/chat/completions", CHAT | {"stop": ["a", "b"], "logit_bias": {"5": -100}, "stop_token_ids": [3], "seed": 7}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
    ("/v1/chat/completions", CHAT | {"stop": None, "logit_bias": None, "response_format": None, "top_p": 1}),
    ("/v1/completions", TEXT | {"structured_outputs": {"choice": ["yes", "no"]}, "stop": "."}),
    ("/v1/completions", TEXT | {"prompt": [1, 2]}),
    ("/v1/completions", TEXT | {"prompt": [[1, 2], [3]]}),
    ("/v1/completions", TEXT | {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/tokenize", TEXT),
    ("/tokenize", CHAT),
    ("/detokenize", {"model": "m", "tokens": []}),
    ("/debug/moves", MOVE),
    ("/debug/moves", MOVE | {"heads": [1]}),
]
REFUSED = [
    ("/v1/chat/completions", {"model": "m"}),
    ("/v1/chat/completions", CHAT | {"stop": [""]}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "yaml"}}),
    ("/v1/completions", TEXT | {"prompt": []}),
    ("/v1/completions", TEXT | {"prompt": [-1]}),
    ("/v1/completions", TEXT | {"n": 65}),
    ("/v1/completions", TEXT | {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
    ("/v1/completions", TEXT | {"stop_token_ids": ["a"]}),
    ("/tokenize", CHAT | TEXT),
    ("/tokenize", {"model": "m"}),
    ("/detokenize", {"model": "m", "tokens": ["a"]}),
    ("/debug/moves", MOVE | {"layers": ["a"]}),
    ("/debug/moves", MOVE | {"source": ""}),
]


def body_of(path: str) -> dict[str, Any]:
    described: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return described


def test_nothing_points_elsewhere() -> None:
    assert '"$ref"' not in json.dumps(DOCUMENT)


def test_bodies_have_the_fields_of_the_requests() -> None:
    routes = {path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", {})}
    assert routes == BODIES.keys()
    for path, model in BODIES.items():
        assert body_of(path)["properties"].keys() == model.model_fields.keys()


@pytest.mark.parametrize(("path", "body"), ALLOWED)
def test_what_is_allowed_is_described_so(path: str, body: dict[str, Any]) -> None:
    jsonschema.validate(body, body_of(path))
    BODIES[path].model_validate(body)


@pytest.mark.parametrize(("path", "body"), REFUSED)
def test_what_is_refused_is_described_so(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, body_of(path))
    with pytest.raises((ApiError, ValidationError)):
        BODIES[path].model_validate(body)


def test_errors_have_the_form_that_is_described() -> None:
    answers = DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]
    described = answers["429"]["content"]["application/json"]["schema"]
    jsonschema.validate(overloaded("many wait").body(), described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"detail": "many wait"}, described)


def test_a_model_within_a_model_is_inlined_wherever_it_is() -> None:
    class Inner(BaseModel):
        depth: int

    class Outer(BaseModel):
        one: Inner
        many: list[Inner] = Field(default_factory=list)

    schema = reads(Outer)["requestBody"]["content"]["application/json"]["schema"]
    assert "$" not in json.dumps(schema)
    jsonschema.validate({"one": {"depth": 1}, "many": [{"depth": 2}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"one": {"depth": 1}, "many": [{"depth": "2"}]}, schema)
