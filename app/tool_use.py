"""How the answers of one chat may call tools: the form of a call, and the grammar that holds them to it.

Where a call is asked for, an answer is calls and nothing else. Where it is left to the model, its text is free, and
once it has begun a call the function's name and arguments are held to what the request has. That takes a beginning
that nothing else has, so it does not hold for `ToolFormat.is_bare`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from app.chat_protocol import ChatCompletionRequest
from app.chat_template import template_of
from app.openai_errors import invalid_request
from app.structured_output import JSON_STYLE, bounded_grammar
from app.tool_call_parser import ToolCallParser
from app.tool_formats import HERMES, ToolFormat, format_of, knows_tools
from app.tool_protocol import NamedTool, Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """See this module."""

    form: ToolFormat
    names: frozenset[str]
    """Of the functions that may be called."""
    grammar: str | None
    """In llguidance's form; None: the answer is free."""
    marker_ids: frozenset[int]
    """Tokens that mark a call, which must be in the text even where special tokens are left out."""

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.form, self.names)


def tool_use(tokenizer: Any, request: ChatCompletionRequest) -> ToolUse | None:
    """None: the answers call nothing. Raises ApiError 400 where the model cannot do what is asked for, or where the
    tools' schemas are too long."""
    tools, choice = request.callable_tools, request.tool_choice
    if not tools:
        return None
    template = template_of(tokenizer, with_tools=True)
    form = format_of(template)
    is_forced = choice == "required" or isinstance(choice, NamedTool)
    if form is None:
        if not is_forced:
            raise invalid_request(_why_not(template), param="tools", code="unsupported_parameter")
        form = HERMES
    markers = {text: token for text in (form.begin, form.end) if (token := _added_token(tokenizer, text)) is not None}
    # A named function is called once, as OpenAI does it. Templates of the bare form refuse a conversation where an
    # answer has called several.
    several = request.parallel_tool_calls is not False and not isinstance(choice, NamedTool) and not form.is_bare
    if is_forced:
        grammar: str | None = _forced(form, tools, markers, several)
    elif form.is_bare:
        grammar = None
    else:
        others = sorted(set(tokenizer.added_tokens_decoder) - {*markers.values(), tokenizer.eos_token_id})
        grammar = _optional(form, tools, markers, others, several)
    if grammar is not None:
        grammar = bounded_grammar(LLMatcher.grammar_from_lark(grammar), "tools")
    return ToolUse(form, frozenset(tool.name for tool in tools), grammar, frozenset(markers.values()))


def _why_not(template: str) -> str:
    told = (
        "its chat template asks for calls in a form that this server does not read"
        if knows_tools(template)
        else "its chat template says nothing of tools"
    )
    return (
        f"This model cannot be left to call tools by itself: {told}. Set 'tool_choice' to \"required\" or to a "
        'function, and describe the tools in the messages. With "required" a small model may call again and again: set '
        "'parallel_tool_calls' to false too, for one call, or 'max_tokens'."
    )


def _forced(form: ToolFormat, tools: tuple[Tool, ...], markers: dict[str, int], several: bool) -> str:
    begin = "" if form.is_bare else _marker(form.begin, markers)
    more = f" ({_text(form.separator)} call)*" if several else ""
    return f"start: call{more}\ncall: {begin} body\n{_bodies(form, tools, markers)}"


def _optional(
    form: ToolFormat, tools: tuple[Tool, ...], markers: dict[str, int], others: list[int], several: bool
) -> str:
    """`others`: added tokens, which are no text to llguidance, such as those around a model's thoughts."""
    begins = ["begin", *(["TEXT " + _marker(form.begin, markers)] if form.begin in markers else [])]
    free = f"(TEXT <[{','.join(map(str, others))}]>)*" if others else ""
    start = f"({free} begun body)* {free} TEXT" if several else f"{free} (TEXT | begun body)"
    return (
        f"start: {start}\nbegun: {' | '.join(begins)}\n"
        f"begin[lazy]: TEXT {_text(form.begin)}\nTEXT: /(.|\\n)*/\n{_bodies(form, tools, markers)}"
    )


def _bodies(form: ToolFormat, tools: tuple[Tool, ...], markers: dict[str, int]) -> str:
    """The rule `body`: a call of one of the tools, without `form.begin`."""
    end = _marker(form.end, markers) if form.end else ""
    rules = [f"body: ({' | '.join(f'body_{index}' for index in range(len(tools)))}) {_text(form.closing)} {end}"]
    for index, tool in enumerate(tools):
        schema = json.dumps({**tool.parameters, "x-guidance": JSON_STYLE})
        rules.append(f"body_{index}: {_text(form.opening(tool.name))} %json {schema}")
    return "\n".join(rules)


def _marker(text: str, markers: dict[str, int]) -> str:
    """A marker as the model writes it: as a token of its own where there is one."""
    return f"<[{markers[text]}]>" if text in markers else _text(text)


def _text(text: str) -> str:
    return json.dumps(text)


def _added_token(tokenizer: Any, text: str) -> int | None:
    added = tokenizer.added_tokens_decoder
    return next((token_id for token_id, token in added.items() if text and token.content == text), None)
