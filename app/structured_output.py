"""What an answer is to keep to, as requests say it, and as a grammar for the engine. Nothing is compiled here: whether
a grammar can be used, `GrammarCheck` finds out.

`response_format` is OpenAI's; `structured_outputs` has vLLM's names for what OpenAI's API cannot say. JSON comes on one
line, spaced as Python's `json.dumps` writes it: a small model that may choose would add blanks without end (ours).
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher

from app.openai_errors import invalid_request
from app.request_parsing import must_be

JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options for a schema."""
_KINDS = ("text", "json_object", "json_schema")
_RULES = ("json", "regex", "choice", "grammar")
_MAX_CHOICES = 1000
_MAX_GRAMMAR_BYTES = 256 * 1024
"""Of a grammar in llguidance's form. Compiling takes hundreds of times as much memory."""
_LARK_PIECE = re.compile(r"""(?s)"(?:\\.|[^"\\])*"?|(?://|\#)[^\n]*|/(?:\\.|[^/\\])*/?|(&|~(?!\s*[0-9]))""")
"""A text, a comment or a regular expression; or an operator on regular expressions, in group 1. Each alternative takes
what it began, so that the search is linear. `~` before a number is a repetition."""

_STRING: dict[str, Any] = {"type": "string", "minLength": 1}
RESPONSE_FORMAT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": [*_KINDS]},
        "json_schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "schema": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
    },
    "required": ["type"],
    "additionalProperties": False,
}
"""For the API's description, as is the next."""
STRUCTURED_OUTPUTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "json": {"type": "object"},
        "regex": _STRING,
        "choice": {"type": "array", "items": _STRING, "minItems": 1, "maxItems": _MAX_CHOICES},
        "grammar": _STRING,
    },
    "additionalProperties": False,
    "minProperties": 1,
    "maxProperties": 1,
}


def response_format_grammar(value: Any) -> str | None:
    """The grammar of a `response_format`; None for text, which is free. For a pydantic validator."""
    allowed = (
        'an object with the "type" "text", "json_object", or "json_schema" and then '
        '"json_schema": {"name": "...", "schema": {...}}'
    )
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") not in _KINDS:
        raise must_be(allowed)
    kind = value["type"]
    if value.keys() - {"type", kind if kind == "json_schema" else "type"}:
        raise must_be(allowed)
    if kind == "text":
        return None
    if kind == "json_object":
        return _json({"type": "object"})
    described = value.get("json_schema")
    if not isinstance(described, dict) or described.keys() - {"name", "schema", "strict", "description"}:
        raise must_be(allowed)
    schema = described.get("schema", {"type": "object"})
    if not isinstance(schema, dict):
        raise must_be(f"{allowed} (the schema is no object)")
    return bounded_grammar(_json(schema), "response_format")


def structured_outputs_grammar(value: Any) -> str | None:
    """The grammar of vLLM's `structured_outputs`. For a pydantic validator."""
    allowed = (
        'an object with exactly one of "json" (a JSON schema), "regex", "choice" (a list of strings) and "grammar" '
        "(Lark, as llguidance reads it)"
    )
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _RULES:
        raise must_be(allowed)
    ((rule, content),) = value.items()
    if rule == "json":
        if not isinstance(content, dict):
            raise must_be(f"{allowed} (the schema is no object)")
        grammar = _json(content)
    elif rule == "choice":
        is_list = isinstance(content, list) and 1 <= len(content) <= _MAX_CHOICES
        if not is_list or not all(isinstance(choice, str) and choice for choice in content):
            raise must_be(f"{allowed} (choices are 1 to {_MAX_CHOICES} strings that are not empty)")
        grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, content)))
    elif not isinstance(content, str) or not content:
        raise must_be(f"{allowed} (the {rule} is no string, or empty)")
    elif rule == "regex":
        grammar = LLMatcher.grammar_from_regex(content)
    else:
        grammar = LLMatcher.grammar_from_lark(content)
    grammar = bounded_grammar(grammar, "structured_outputs")
    if rule == "grammar" and any(piece[1] for piece in _LARK_PIECE.finditer(content)):
        raise invalid_request(
            "'structured_outputs' cannot be used: '&' and '~' on regular expressions are not allowed, since they may "
            "take time without an end. Write rules, or one regular expression.",
            param="structured_outputs",
            code="invalid_grammar",
        )
    return grammar


def _json(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
    except ValueError:
        raise must_be("an object whose JSON schema has no integers of more than 64 bits") from None


def bounded_grammar(grammar: str, param: str) -> str:
    """The grammar, in llguidance's form. Raises ApiError 400 for the field `param` if it is too long."""
    num_bytes = len(grammar.encode())
    if num_bytes > _MAX_GRAMMAR_BYTES:
        raise invalid_request(
            f"'{param}' cannot be used: as a grammar it has {num_bytes} bytes, and at most {_MAX_GRAMMAR_BYTES} are "
            "allowed. Make it shorter.",
            param=param,
            code="invalid_grammar",
        )
    return grammar
