"""The kinds of answers whose costs `format_cost` compares, and whether a server really gives them."""

from __future__ import annotations

from typing import Any

import aiohttp

FREE_TEXT, JSON_SCHEMA, TOOL_CALL = "free text", "JSON schema", "tool call"

_TOOL = "save_records"
_BEGINS = '{"records": [{"name": "'
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 24}
_RECORD: dict[str, Any] = {
    "name": _TEXT,
    "colour": {"enum": ["red", "green", "blue"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 9999},
    "weight": {"type": "number", "minimum": 0, "maximum": 10},
    "is_new": {"type": "boolean"},
    "tags": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2},
    "owner": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "note": _TEXT},
        "required": ["id", "note"],
        "additionalProperties": False,
    },
}
_LEAST_RECORDS = 1000
"""More than any answer has tokens for, so that none can end before its limit."""
_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "records": {
            "type": "array",
            "minItems": _LEAST_RECORDS,
            "items": {
                "type": "object",
                "properties": _RECORD,
                "required": list(_RECORD),
                "additionalProperties": False,
            },
        }
    },
    "required": ["records"],
    "additionalProperties": False,
}
MOST_OUTPUT_TOKENS = 8 * _LEAST_RECORDS
"""A record takes many more tokens than eight."""

KINDS: dict[str, dict[str, Any]] = {
    FREE_TEXT: {},
    JSON_SCHEMA: {"response_format": {"type": "json_schema", "json_schema": {"name": "records", "schema": _FORM}}},
    TOOL_CALL: {
        "tools": [{"type": "function", "function": {"name": _TOOL, "parameters": _FORM}}],
        "tool_choice": "required",
    },
}
"""What the body of a chat of each kind has besides."""

_CHECK_TOKENS = 40
_CHECK_LIMIT_S = 120.0


class FormError(Exception):
    """A server that does not hold its answers to what was asked for; the message says which."""


async def check_forms(base_url: str, model: str) -> None:
    """Asks for one short answer of each kind. Raises FormError for one that is not of its kind."""
    url = base_url.rstrip("/") + "/v1/chat/completions"
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Write down what you see."}],
        "max_tokens": _CHECK_TOKENS,
        "temperature": 0,
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CHECK_LIMIT_S)) as session:
        for kind, extra in KINDS.items():
            try:
                async with session.post(url, json=body | extra) as response:
                    answer = await response.json(content_type=None)
                is_of_kind = _is_of_kind(kind, answer["choices"][0]["message"])
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise FormError(f"{kind}: {url} gave no chat completion ({type(error).__name__}: {error})") from error
            if not is_of_kind:
                raise FormError(f"{kind}: the server's answer is not of that kind: {str(answer)[:300]}")


def _is_of_kind(kind: str, message: dict[str, Any]) -> bool:
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    if kind == TOOL_CALL:
        functions = [call["function"] for call in calls]
        return [function["name"] for function in functions] == [_TOOL] and functions[0]["arguments"].startswith(_BEGINS)
    return not calls and bool(text) and (kind == JSON_SCHEMA) == text.startswith(_BEGINS)
