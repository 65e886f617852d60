"""Log-probabilities through the running app, against a forward pass in transformers."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
import torch

from tests.openai_app import OpenAIApp, cached_tokens, fresh_salt, text_of
from tests.reference_text import ReferenceText

pytestmark = [pytest.mark.cluster, pytest.mark.model]

QUESTION = "What is the capital of France?"
STORY = "Once upon a time there was a little"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def token_of(reference: ReferenceText) -> dict[str, int]:
    """Token ids by their text, for tokens that are whole characters."""
    vocabulary = range(len(reference.tokenizer))
    texts = reference.tokenizer.batch_decode([[token] for token in vocabulary])
    return {text: token for token, text in zip(vocabulary, texts, strict=True) if "\ufffd" not in text}


def assert_near(got: list[float], expected: list[float]) -> None:
    assert got == pytest.approx(expected, abs=TOLERANCE)


def test_a_chats_logprobs(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.chat_prompt(QUESTION)
    expected = reference.greedy(prompt, 32)
    rows = reference.logprobs(prompt, expected)
    (choice,) = openai_app.chat(QUESTION, max_tokens=32, logprobs=True, top_logprobs=3).choices
    entries = choice.logprobs.content
    assert len(entries) == len(expected)
    for entry, token, row in zip(entries, expected, rows, strict=True):
        best = row.topk(3)
        assert (entry.token, bytes(entry.bytes)) == (text_in(reference, token), text_in(reference, token).encode())
        assert_near([entry.logprob], [float(row[token])])
        assert [top.token for top in entry.top_logprobs] == [text_in(reference, token) for token in best.indices]
        assert_near([top.logprob for top in entry.top_logprobs], best.values.tolist())
    joined = b"".join(bytes(entry.bytes) for entry in entries[:-1])
    assert joined.decode() == choice.message.content


def text_in(reference: ReferenceText, token: int | torch.Tensor) -> str:
    return str(reference.tokenizer.decode([int(token)]))


def test_a_chat_has_no_more_logprobs_than_asked_for(openai_app: OpenAIApp) -> None:
    assert openai_app.chat(QUESTION, max_tokens=2).choices[0].logprobs is None
    for options in ({}, {"top_logprobs": 0}):
        (choice,) = openai_app.chat(QUESTION, max_tokens=2, logprobs=True, **options).choices
        assert [entry.top_logprobs for entry in choice.logprobs.content] == [[], []]


def test_a_completions_logprobs(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.tokenizer.encode(STORY)
    expected = reference.greedy(prompt, 8)
    rows = reference.logprobs(prompt, expected)
    texts = [text_in(reference, token) for token in expected]
    (choice,) = openai_app.complete(STORY, max_tokens=8, logprobs=2).choices
    assert choice.logprobs.tokens == texts
    assert choice.logprobs.text_offset == [len("".join(texts[:count])) for count in range(8)]
    assert_near(choice.logprobs.token_logprobs, [float(row[t]) for row, t in zip(rows, expected, strict=True)])
    for top, row in zip(choice.logprobs.top_logprobs, rows, strict=True):
        best = row.topk(2)
        assert list(top) == [text_in(reference, token) for token in best.indices]
        assert_near(list(top.values()), best.values.tolist())


def test_of_sampled_tokens_the_models_own_probability_is_told(
    openai_app: OpenAIApp, reference: ReferenceText, token_of: dict[str, int]
) -> None:
    """Neither temperature nor penalties nor bias change it, and the sampled token is told beside the likelier ones."""
    prompt = reference.tokenizer.encode(STORY)
    (choice,) = openai_app.complete(
        STORY, max_tokens=8, logprobs=1, temperature=1.8, seed=11, frequency_penalty=1.0, ignore_eos=True,
        logit_bias={str(token_of[" cat"]): 5},
    ).choices  # fmt: skip
    tokens = [token_of[text] for text in choice.logprobs.tokens]
    rows = reference.logprobs(prompt, tokens)
    assert_near(choice.logprobs.token_logprobs, [float(row[t]) for row, t in zip(rows, tokens, strict=True)])
    assert tokens != rows.argmax(-1).tolist()
    for top, token, row in zip(choice.logprobs.top_logprobs, tokens, rows, strict=True):
        assert set(top) == {text_in(reference, int(row.argmax())), text_in(reference, token)}


@pytest.mark.parametrize("warm", [False, True])
def test_an_echoed_prompts_logprobs(openai_app: OpenAIApp, reference: ReferenceText, warm: bool) -> None:
    """More tokens than one step may have, so that the prompt is computed in chunks; the same when it is cached."""
    prompt = reference.tokenizer.encode("The quick brown fox jumps over the lazy dog, and runs on. " * 38)
    assert len(prompt) > 512
    salt = fresh_salt()
    if warm:
        openai_app.complete(prompt, max_tokens=2, cache_salt=salt)
        assert cached_tokens(openai_app.complete(prompt, max_tokens=1, cache_salt=salt)) > 0
    answer = openai_app.complete(prompt, max_tokens=3, echo=True, logprobs=1, cache_salt=salt)
    (choice,) = answer.choices
    generated = reference.greedy(prompt, 3)
    tokens = [*prompt, *generated]
    assert choice.text == reference.text(tokens)
    assert choice.logprobs.tokens == [text_in(reference, token) for token in tokens]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    rows = reference.logprobs(prompt[:1], tokens[1:])
    assert_near(choice.logprobs.token_logprobs[1:], [float(row[t]) for row, t in zip(rows, tokens[1:], strict=True)])
    for top, token, row in zip(choice.logprobs.top_logprobs[1:], tokens[1:], rows, strict=True):
        assert set(top) == {text_in(reference, int(row.argmax())), text_in(reference, token)}
    assert cached_tokens(answer) == 0  # every position is needed, so nothing is taken from a cache


def assert_prompt_logprobs(reference: ReferenceText, prompt: list[int], got: list[Any], num_top: int) -> None:
    assert len(got) == len(prompt)
    assert got[0] is None
    for entry, token, row in zip(got[1:], prompt[1:], reference.logprobs(prompt[:1], prompt[1:]), strict=True):
        best = row.topk(num_top)
        likely = {str(int(top)): rank for rank, top in enumerate(best.indices, start=1)}
        assert entry.keys() == {*likely, str(token)}
        assert {key: value["rank"] for key, value in entry.items() if key in likely} == likely
        for key, value in entry.items():
            assert_near([value["logprob"]], [float(row[int(key)])])
            assert value["decoded_token"] == text_in(reference, int(key))


def test_a_prompts_logprobs_in_vllms_form(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    extra = {"prompt_logprobs": 2}
    answer = openai_app.client.completions.create(
        model=openai_app.model, prompt=STORY, max_tokens=2, n=2, temperature=0, extra_body=extra
    )
    for choice in answer.choices:
        assert choice.logprobs is None
        assert choice.text
        assert_prompt_logprobs(reference, reference.tokenizer.encode(STORY), choice.prompt_logprobs, 2)  # type: ignore[attr-defined]
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat: Any = openai_app.client.chat.completions.create(
        model=openai_app.model, messages=messages, max_tokens=2, extra_body=extra
    )
    assert_prompt_logprobs(reference, reference.chat_prompt(QUESTION), chat.prompt_logprobs, 2)
    assert not hasattr(openai_app.chat(QUESTION, max_tokens=1), "prompt_logprobs")


def test_embeddings_are_refused(openai_app: OpenAIApp) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        openai_app.client.embeddings.create(model=openai_app.model, input="hi")


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_scoring_a_short_prompt_twice_gives_the_same(
    openai_app: OpenAIApp, reference: ReferenceText, max_tokens: int
) -> None:
    salt = fresh_salt()
    options: dict[str, Any] = {"echo": True, "logprobs": 0, "cache_salt": salt, "max_tokens": max_tokens}
    cold, warm = (openai_app.complete(STORY, **options).choices[0] for _ in range(2))
    assert cold.logprobs.tokens == warm.logprobs.tokens
    assert cold.logprobs.token_logprobs[1:] == pytest.approx(warm.logprobs.token_logprobs[1:], abs=1e-5)
    prompt = reference.tokenizer.encode(STORY)
    expected = reference.logprobs(prompt[:1], prompt[1:]).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert_near(cold.logprobs.token_logprobs[1 : len(prompt)], expected.tolist())
    assert len(cold.logprobs.tokens) == len(prompt) + max_tokens


def test_a_prompt_of_one_token(openai_app: OpenAIApp) -> None:
    (choice,) = openai_app.complete([500], echo=True, logprobs=2, max_tokens=1).choices
    assert choice.logprobs.token_logprobs[0] is None
    assert math.exp(choice.logprobs.token_logprobs[1]) <= 1.0


def test_a_cached_prefix_does_not_change_the_answers_logprobs(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = list(range(2000, 2040))
    salt = fresh_salt()
    cold, warm = (openai_app.complete(prompt, max_tokens=6, logprobs=1, cache_salt=salt) for _ in range(2))
    assert (cached_tokens(cold), cached_tokens(warm)) == (0, 32)
    assert text_of(cold) == text_of(warm)
    assert_near(warm.choices[0].logprobs.token_logprobs, cold.choices[0].logprobs.token_logprobs)
    tokens = reference.greedy(prompt, 6)
    rows = reference.logprobs(prompt, tokens)
    assert_near(warm.choices[0].logprobs.token_logprobs, [float(row[t]) for row, t in zip(rows, tokens, strict=True)])


def test_tokens_that_are_parts_of_characters(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    """Each such token's bytes are told as they are, and together they are the text."""
    messages = [{"role": "user", "content": "Repeat: 😀😃😄😀😃😄"}]
    (choice,) = openai_app.chat(
        messages, max_tokens=9, logprobs=True, logit_bias=dict.fromkeys(forced(reference, "😄"), 60)
    ).choices
    got = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert any(entry.token.startswith("bytes:\\x") for entry in choice.logprobs.content)
    assert got.decode("utf-8", "ignore") == choice.message.content


def forced(reference: ReferenceText, text: str) -> list[str]:
    tokens = reference.tokenizer.encode(text)
    assert len(tokens) > 1
    return [str(token) for token in tokens]
