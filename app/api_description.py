"""What openapi.json says of each route beside its name: the body that it reads, and all that it may answer.

Routes read their bodies by themselves, since errors are to be OpenAI's and long bodies are read in a thread; so the web
framework does not see what they take. Here that is said, from the same models that check it.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from pydantic import BaseModel

Schema = dict[str, Any]

_STRING: Final[Schema] = {"type": "string"}
_EVENT: Final[Schema] = {
    "type": "object",
    "description": "Of each event: `data` is a piece of the answer as JSON, an error, or [DONE].",
    "properties": {"data": _STRING},
    "required": ["data"],
}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}


def _object(**properties: Schema) -> Schema:
    """Of just these fields, all of them there."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _open(described: Schema) -> Schema:
    """The same, and further fields beside."""
    return described | {"additionalProperties": True}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, **choice: Schema) -> Schema:
    usage = _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    )
    ends = {"enum": ["stop", "length", "tool_calls"]}
    # There are more fields where the request asks for more.
    described = _open(_object(index=_COUNT, **choice, logprobs=_nullable({"type": "object"}), finish_reason=ends))
    whole = _object(
        id=_STRING,
        object={"const": kind},
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_nullable(_STRING),
        choices=_list(described),
        usage=usage,
    )
    return _open(whole)


MODEL: Final = _object(
    id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING, max_model_len={"type": "integer"}
)
_MESSAGE: Final = _open(_object(role={"const": "assistant"}, content=_nullable(_STRING), refusal={"type": "null"}))

CHAT_COMPLETION: Final = _answer("chat.completion", message=_MESSAGE)
RESPONSE: Final = _open(
    _object(id=_STRING, object={"const": "response"}, status=_STRING, output=_list(_open(_object(type=_STRING))))
)
TEXT_COMPLETION: Final = _answer("text_completion", text=_STRING)
MODELS: Final = _object(object={"const": "list"}, data=_list(MODEL))
TOKENS: Final = _object(tokens=_list(_COUNT), count=_COUNT, max_model_len=_COUNT)
TEXT: Final = _object(prompt=_STRING)
HEALTH: Final = _object(status={"enum": ["ok", "unhealthy"]}, problems=_list(_STRING))
MOVES: Final[Schema] = {"type": "object"}
BLOCKS: Final = _object(workers=_list({"type": "object"}), inflight_requests=_COUNT, queued_requests=_COUNT)

_ERROR: Final = _object(error=_object(message=_STRING, type=_STRING, param=_nullable(_STRING), code=_nullable(_STRING)))

FORBIDDEN: Final = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
"""Of every route but /health."""
NO_WORKER: Final = (*FORBIDDEN, HTTPStatus.SERVICE_UNAVAILABLE)
WITH_BODY: Final = (
    *NO_WORKER,
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.INTERNAL_SERVER_ERROR,
)
GENERATION: Final = (*WITH_BODY, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.GATEWAY_TIMEOUT)
NO_CONTROLLER: Final = (*NO_WORKER, HTTPStatus.NOT_FOUND)
MOVE_ORDER: Final = (*WITH_BODY, HTTPStatus.CONFLICT)

_MEANING: Final[dict[HTTPStatus, str]] = {
    HTTPStatus.BAD_REQUEST: "Something in the request is wrong; `param` says what.",
    HTTPStatus.UNAUTHORIZED: "No valid API key was given.",
    HTTPStatus.FORBIDDEN: "A server without keys serves its own machine only.",
    HTTPStatus.NOT_FOUND: "What was asked for is not here: another model, or a mode in which nothing moves.",
    HTTPStatus.CONFLICT: "The move cannot be made now; the message says why.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too long.",
    HTTPStatus.TOO_MANY_REQUESTS: "The server is overloaded, or the key is at its limit; see Retry-After.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The server failed; its log says why.",
    HTTPStatus.SERVICE_UNAVAILABLE: "No worker, or no controller, can take the request now.",
    HTTPStatus.GATEWAY_TIMEOUT: "The answer took longer than a request may.",
}


def answers(
    meaning: str, schema: Schema, *errors: int, streams: bool = False, status: HTTPStatus = HTTPStatus.OK
) -> dict[int | str, Schema]:
    """For a route's `responses`: `status` with a body of that schema, and errors in OpenAI's form."""
    content: Schema = {"application/json": {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": _EVENT}
    found: dict[int | str, Schema] = {status.value: {"description": meaning, "content": content}}
    for error in map(HTTPStatus, sorted(errors)):
        body = {"application/json": {"schema": _ERROR}}
        found[error.value] = {"description": _MEANING[error], "content": body}
    return found


def reads(body: type[BaseModel]) -> Schema:
    """For a route's `openapi_extra`: a JSON body of that model."""
    schema = body.model_json_schema()
    inlined = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def generation(body: type[BaseModel], answer: Schema) -> dict[str, Any]:
    """The `responses` and `openapi_extra` of a route that generates: an answer of that schema, or a stream of it."""
    described = answers("The answer, or a stream of its pieces.", answer, *GENERATION, streams=True)
    return {"responses": described, "openapi_extra": reads(body)}


def in_path(name: str, meaning: str) -> Schema:
    """For a route's `openapi_extra`: a part of its path, which it reads by itself."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "description": meaning, "schema": _STRING}]}


def _inlined(node: Any, definitions: Schema) -> Any:
    """A schema without references: those of one model would point into the whole document. None of ours is
    recursive."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].removeprefix("#/$defs/")], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}
