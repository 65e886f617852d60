"""/v1/responses through the running app, with the official client: a chat in other words."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.openai_app import OpenAIApp, text_of

pytestmark = [pytest.mark.cluster, pytest.mark.model]

QUESTION = "What is the capital of France?"


def ask(app: OpenAIApp, given: Any = QUESTION, **fields: Any) -> Any:
    return app.client.responses.create(model=app.model, input=given, temperature=0, **fields)


def test_it_says_what_a_chat_says(openai_app: OpenAIApp) -> None:
    chat = openai_app.chat(QUESTION, max_tokens=40)
    answer = ask(openai_app, max_output_tokens=40)
    assert answer.output_text == text_of(chat)
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert ask(openai_app, instructions="Be brief.", max_output_tokens=8).output_text == text_of(
        openai_app.chat(told, max_tokens=8)
    )


def test_a_cut_answer_says_so(openai_app: OpenAIApp) -> None:
    answer = ask(openai_app, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("max_tokens", [3, 40])
def test_a_stream_has_the_events_that_the_client_knows(openai_app: OpenAIApp, max_tokens: int) -> None:
    whole: Response = ask(openai_app, max_output_tokens=max_tokens)
    events = list(ask(openai_app, max_output_tokens=max_tokens, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] == f"response.{whole.status}"
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.model_dump(), strict=True)  # the client itself builds them unchecked
    last = events[-1].response
    assert (last.output_text, last.status) == (whole.output_text, whole.status)
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_an_answer_is_gone_on_with_and_keeps_to_a_format(openai_app: OpenAIApp) -> None:
    first = ask(openai_app, max_output_tokens=40)
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    turns = [{"role": "user", "content": QUESTION}, *first.output, {"role": "user", "content": "Are you sure?"}]
    second = ask(openai_app, turns, text={"format": {"type": "json_schema", "name": "sure", "schema": schema}})
    assert json.loads(second.output_text).keys() == {"yes"}
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


def test_what_is_not_supported_is_refused(openai_app: OpenAIApp) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ask(openai_app, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        openai_app.client.responses.create(model="another", input="hi")
