"""Chat messages to token ids, by the model's own template.

transformers renders templates in Jinja's immutable sandbox, and they come with the model; a request can set variables
of the template but can't bring one, nor any other argument of `apply_chat_template`.
"""

from __future__ import annotations

import inspect
from typing import Any

from jinja2 import TemplateError

from app.chat_protocol import ChatCompletionRequest
from app.openai_errors import ApiError, invalid_request
from app.tool_formats import HERMES, knows_tools

_LONGEST_REASON_CHARS = 300


def render_chat(tokenizer: Any, request: ChatCompletionRequest) -> tuple[int, ...]:
    """The prompt of a chat, as `tokenizer.apply_chat_template` gives it: special tokens are the template's own, so
    there is no second BOS.

    A template that knows nothing of the role "developer" (OpenAI's newer name for "system") gets "system" (ours), and
    one that has no place for an earlier answer's calls gets them as part of its text.
    Raises ApiError 400 when the tokenizer has no template, the template refuses the messages (with its own words), or
    `chat_template_kwargs` names something that is not the request's to set.
    """
    tools = [tool.document for tool in request.callable_tools]
    template = template_of(tokenizer, with_tools=bool(tools))
    variables = request.chat_template_kwargs or {}
    _check_variables(tokenizer, variables)
    messages = [message.for_template() for message in request.messages]
    if "developer" not in template:
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
        ]
    if "tool_calls" not in template:
        messages = [_with_calls_as_text(message) for message in messages]
    try:
        token_ids = tokenizer.apply_chat_template(
            messages,
            tools=tools if tools and knows_tools(template) else None,
            chat_template=template,
            add_generation_prompt=request.begins_answer,
            continue_final_message=bool(request.continue_final_message),
            tokenize=True,
            return_dict=False,
            **variables,
        )
    # TypeError and ValueError: a template that computes with what it was not written for, and transformers' own checks.
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise _refused(error) from error
    if not token_ids:
        raise invalid_request("The model's chat template turns these messages to no tokens at all.", param="messages")
    return tuple(token_ids)


def template_of(tokenizer: Any, *, with_tools: bool) -> str:
    """The text of the model's template; of several, the one for tools where there are some. Raises ApiError 400."""
    if tokenizer.chat_template is None:
        raise invalid_request(
            "This model has no chat template, so it cannot answer chats. Use /v1/completions.",
            param="messages",
            code="no_chat_template",
        )
    try:
        return str(tokenizer.get_chat_template(tools=[{}] if with_tools else None))
    except ValueError as error:  # several templates, none of them the default
        raise _refused(error) from error


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = "\n".join(part for part in (message["content"], HERMES.written(calls)) if part)
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}


def _check_variables(tokenizer: Any, variables: dict[str, Any]) -> None:
    reserved = {
        "messages",
        "self",
        "conversations",  # as `apply_chat_template` names messages where it hands all on
        "return_assistant_tokens_mask",
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *tokenizer.special_tokens_map,
    }
    for name in variables:
        if name in reserved:
            raise invalid_request(
                f"'chat_template_kwargs' must not set '{name[:64]}': it is no variable of the template's own.",
                param="chat_template_kwargs",
            )


def _refused(error: Exception) -> ApiError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if len(reason) > _LONGEST_REASON_CHARS:
        reason = reason[:_LONGEST_REASON_CHARS] + "..."
    return invalid_request(
        f"The model's chat template refuses these messages: {reason}", param="messages", code="chat_template_error"
    )
