"""Completions through OpenAI's own client of the running app, against the same model in transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.openai_app import BLOCK_TOKENS, OpenAIApp, cached_tokens, fresh_salt, text_of
from tests.reference_text import ReferenceText

pytestmark = [pytest.mark.cluster, pytest.mark.model]

CAPITAL = "The capital of France is"
COUNTING = "1, 2, 3, 4,"
STORY = "Once upon a time there was a"


def test_a_text_is_gone_on_with(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.tokenizer.encode(CAPITAL)
    answer = openai_app.complete(CAPITAL, max_tokens=10)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert choice.text == reference.text(reference.greedy(prompt, 10))
    assert choice.text.startswith(" Paris")  # the space is the answer's
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 10)


def test_sixteen_tokens_unless_asked_otherwise(openai_app: OpenAIApp) -> None:
    answer = openai_app.complete(CAPITAL, ignore_eos=True)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


def test_token_ids_are_a_prompt_too(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.tokenizer.encode(STORY)
    answer = openai_app.complete(prompt, max_tokens=8)
    assert text_of(answer) == text_of(openai_app.complete(STORY, max_tokens=8))
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_batch_of_prompts(openai_app: OpenAIApp, reference: ReferenceText, as_ids: bool) -> None:
    texts = [COUNTING, CAPITAL, STORY, COUNTING]
    prompts = [reference.tokenizer.encode(text) for text in texts]
    answer = openai_app.complete(prompts if as_ids else texts, max_tokens=6)
    expected = [reference.text(reference.greedy(prompt, 6)) for prompt in prompts]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(expected))
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 4 * 6


def test_several_answers_to_each_prompt_of_a_batch(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompts = [reference.tokenizer.encode(text) for text in (CAPITAL, STORY)]
    answer = openai_app.complete(prompts, n=2, best_of=2, max_tokens=6, seed=5, temperature=1.5, ignore_eos=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    alone = openai_app.complete(prompts[1], n=2, max_tokens=6, seed=5, temperature=1.5, ignore_eos=True)
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("prompt", [CAPITAL, "Grüße 😀, 你"])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_echoed_prompt(openai_app: OpenAIApp, reference: ReferenceText, prompt: str, as_ids: bool) -> None:
    token_ids = reference.tokenizer.encode(prompt)
    whole = reference.text([*token_ids, *reference.greedy(token_ids, 5)])
    given = token_ids if as_ids else prompt
    answer = openai_app.complete(given, echo=True, max_tokens=5)
    assert text_of(answer) == whole
    assert whole.startswith(prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(token_ids), 5)
    alone = openai_app.complete(given, echo=True, max_tokens=0)
    assert (text_of(alone), alone.choices[0].finish_reason) == (prompt, "length")
    assert alone.usage.completion_tokens == 0


def test_prompts_in_a_batch_are_each_echoed(openai_app: OpenAIApp) -> None:
    answer = openai_app.complete([CAPITAL, STORY], n=2, echo=True, max_tokens=2)
    assert [choice.text.startswith(CAPITAL) for choice in answer.choices] == [True, True, False, False]
    assert [choice.text.startswith(STORY) for choice in answer.choices] == [False, False, True, True]


@pytest.mark.parametrize("length", [BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS])
def test_what_was_cached_is_said(openai_app: OpenAIApp, length: int) -> None:
    """Whole blocks only; the last token of the prompt is always computed."""
    options: dict[str, Any] = {"max_tokens": 4, "cache_salt": fresh_salt()}
    prompt = list(range(1000, 1000 + length))
    cold = openai_app.complete(prompt, **options)
    warm = openai_app.complete(prompt, **options)
    assert (cached_tokens(cold), cached_tokens(warm)) == (0, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert text_of(cold) == text_of(warm)
    batch = openai_app.complete([prompt, [5, *prompt]], **options)
    assert cached_tokens(batch) == cached_tokens(warm)  # the second one begins otherwise
    assert batch.usage.prompt_tokens == 2 * length + 1
