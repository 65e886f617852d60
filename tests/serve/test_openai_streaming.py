"""Streams through OpenAI's own client, and as bytes, from the running app."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai.types import Completion

from tests.openai_app import OpenAIApp, fresh_salt, text_of
from tests.reference_text import ReferenceText
from tests.running_app import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

STORY = "Once upon a time there was a little"
QUESTION = "What is the capital of France?"
TEXTS = {
    "english": STORY,
    "chinese": "你好，世界。你好，世界。你好，世界。",
    "japanese": "こんにちは世界。こんにちは世界。こんにち",
    "russian": "Привет, мир! Привет, мир! Привет,",
    "emoji": "😀😃😄😀😃😄😀😃😄",
}


class Streamed:
    """What a stream said, by choice; checks what every stream must keep to."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.chunks = list(chunks)
        self.texts: dict[int, str] = {}
        self.pieces: dict[int, list[str]] = {}
        self.reasons: dict[int, str] = {}
        assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in self.chunks}) == 1
        for chunk in self.chunks:
            for choice in chunk.choices:
                is_chat = hasattr(choice, "delta")
                text = (choice.delta.content or "") if is_chat else choice.text
                assert choice.index not in self.reasons  # nothing follows the end of a choice
                if is_chat:
                    assert (choice.delta.role == "assistant") == (choice.index not in self.texts)
                assert "\ufffd" not in text
                self.texts[choice.index] = self.texts.get(choice.index, "") + text
                self.pieces.setdefault(choice.index, []).append(text)
                if choice.finish_reason is not None:
                    self.reasons[choice.index] = choice.finish_reason
        assert self.reasons.keys() == self.texts.keys()


def complete_both_ways(openai_app: OpenAIApp, prompt: Any, **options: Any) -> tuple[Streamed, Completion]:
    """The same request as a stream and as a whole, at the same time."""
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(openai_app.complete, prompt, **options)
        streamed = Streamed(openai_app.complete(prompt, stream=True, **options))
        return streamed, whole.result()


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("as_ids", [False, True])
def test_the_pieces_are_the_whole_text(
    openai_app: OpenAIApp, reference: ReferenceText, language: str, as_ids: bool
) -> None:
    prompt = reference.tokenizer.encode(TEXTS[language])
    tokens = reference.greedy(prompt, 16)
    if language != "english":
        # There is something to break: tokens that are parts of characters.
        assert any("\ufffd" in reference.tokenizer.decode([token]) for token in tokens)
    given = prompt if as_ids else TEXTS[language]
    streamed, whole = complete_both_ways(openai_app, given, max_tokens=16)
    assert streamed.texts == {0: reference.text(tokens)}
    assert streamed.texts[0] == text_of(whole)
    assert streamed.reasons == {0: "length"}
    assert len([piece for piece in streamed.pieces[0] if piece]) > 3


@pytest.mark.parametrize("tokens", range(1, 7))
def test_a_stream_that_is_cut_within_a_character(openai_app: OpenAIApp, tokens: int) -> None:
    streamed, whole = complete_both_ways(openai_app, TEXTS["emoji"], max_tokens=tokens)
    assert streamed.texts[0] == text_of(whole)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == tokens
    assert set(streamed.texts[0]) <= {"😄"}


def test_a_chat(openai_app: OpenAIApp) -> None:
    streamed = Streamed(openai_app.chat(QUESTION, stream=True))
    assert streamed.texts == {0: "The capital of France is Paris."}
    assert streamed.reasons == {0: "stop"}
    assert [chunk.usage for chunk in streamed.chunks] == [None] * len(streamed.chunks)
    # One chunk for the role, one for each token that has text, one for the end.
    assert len(streamed.chunks) == 1 + 7 + 1


@pytest.mark.parametrize("chat", [True, False])
def test_usage_comes_last_when_it_is_asked_for(openai_app: OpenAIApp, chat: bool) -> None:
    ask, prompt = (openai_app.chat, QUESTION) if chat else (openai_app.complete, list(range(3000, 3040)))
    salt = fresh_salt()
    options: dict[str, Any] = {"max_tokens": 6, "cache_salt": salt}
    streamed = Streamed(ask(prompt, stream=True, stream_options={"include_usage": True}, **options))
    whole = ask(prompt, **options)
    last = streamed.chunks[-1]
    assert last.choices == []
    assert [chunk.usage for chunk in streamed.chunks[:-1]] == [None] * (len(streamed.chunks) - 1)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name) > 0
    assert last.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.usage.prompt_tokens_details.cached_tokens == 32  # two blocks of the 37 and 40 tokens


@pytest.mark.parametrize(
    "stop", [" girl", "ir", "l n", "girl named Emma who", ["nowhere", "d E"], "Emma was", " rolling hills and"]
)
def test_stop_strings_do_not_leak(openai_app: OpenAIApp, stop: str | list[str]) -> None:
    streamed, whole = complete_both_ways(openai_app, STORY, max_tokens=12, stop=stop)
    assert (streamed.texts[0], streamed.reasons[0]) == (text_of(whole), whole.choices[0].finish_reason)
    for string in [stop] if isinstance(stop, str) else stop:
        assert string not in streamed.texts[0]


def test_several_choices(openai_app: OpenAIApp) -> None:
    options: dict[str, Any] = {"n": 3, "max_tokens": 6, "seed": 4, "temperature": 1.5, "ignore_eos": True}
    streamed = Streamed(openai_app.chat(QUESTION, stream=True, stream_options={"include_usage": True}, **options))
    whole = openai_app.chat(QUESTION, **options)
    assert streamed.texts == {choice.index: choice.message.content for choice in whole.choices}
    assert streamed.reasons == dict.fromkeys(range(3), "length")
    assert streamed.chunks[-1].usage.completion_tokens == 18


def test_a_batch_of_prompts(openai_app: OpenAIApp) -> None:
    prompts = [STORY, TEXTS["emoji"], "1, 2, 3, 4,"]
    options: dict[str, Any] = {"n": 2, "max_tokens": 5, "echo": True}
    streamed = Streamed(openai_app.complete(prompts, stream=True, **options))
    whole = openai_app.complete(prompts, **options)
    assert streamed.texts == {choice.index: choice.text for choice in whole.choices}
    assert [streamed.texts[2 * place].startswith(prompt) for place, prompt in enumerate(prompts)] == [True] * 3


def test_logprobs_of_a_chat(openai_app: OpenAIApp) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 6}
    chunks = list(openai_app.chat(QUESTION, stream=True, **options))
    entries = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    whole = openai_app.chat(QUESTION, **options).choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [(entry.token, entry.bytes) for entry in whole]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in whole], abs=1e-3)


def test_logprobs_of_a_completion_come_though_its_text_is_held_back(openai_app: OpenAIApp) -> None:
    options: dict[str, Any] = {"logprobs": 1, "max_tokens": 5, "stop": " girl named Emma was"}
    chunks = list(openai_app.complete(STORY, stream=True, **options))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    whole = openai_app.complete(STORY, **options).choices[0].logprobs
    for name in ("tokens", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(whole, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(whole.tokens)


def test_the_bytes_of_a_stream(openai_app: OpenAIApp) -> None:
    request = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True}
    answer = openai_app.post("/v1/chat/completions", request)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.decode("ascii").split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    assert [json.loads(event[6:])["object"] for event in events[:-2]] == ["chat.completion.chunk"] * (len(events) - 2)


def test_tokens_are_sent_while_others_are_still_made(openai_app: OpenAIApp) -> None:
    app = openai_app.app
    stream = openai_app.complete(STORY, max_tokens=2000, ignore_eos=True, stream=True)
    next(iter(stream))
    state = app.get("/debug/blocks")[1]
    assert state["inflight_requests"] == 1
    stream.close()
    wait_until(lambda: app.get("/debug/blocks")[1]["inflight_requests"] == 0, 30.0, "the request went on")
    wait_until(lambda: app.total("live_blocks") == 0, 30.0, "a worker kept blocks")
    assert app.total("generated_tokens", "decode") > 0


def test_a_client_that_goes_away_in_a_whole_answer_frees_it(openai_app: OpenAIApp) -> None:
    app = openai_app.app
    address = urlsplit(app.base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {"model": openai_app.model, "prompt": STORY, "max_tokens": 2000, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    wait_until(lambda: app.get("/debug/blocks")[1]["inflight_requests"] == 1, 30.0, "the request did not start")
    connection.close()
    wait_until(lambda: app.get("/debug/blocks")[1]["inflight_requests"] == 0, 30.0, "the request went on")
    wait_until(lambda: app.total("live_blocks") == 0, 30.0, "a worker kept blocks")
