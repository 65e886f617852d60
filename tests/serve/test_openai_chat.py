"""Chats through OpenAI's own client of the running app, against the same model in transformers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.openai_app import BLOCK_TOKENS, CONTEXT_TOKENS, Messages, OpenAIApp, cached_tokens, fresh_salt, text_of
from tests.reference_text import ReferenceText

pytestmark = [pytest.mark.cluster, pytest.mark.model]

CAPITAL = "What is the capital of France?"
FRENCH = "Say hello in French."
DIALOGUE: Messages = [
    {"role": "system", "content": "You answer in few words."},
    {"role": "user", "content": "Name three colors."},
    {"role": "assistant", "content": "Red, green and blue."},
    {"role": "user", "content": "And one more?"},
]


def test_the_list_of_models(openai_app: OpenAIApp) -> None:
    (model,) = openai_app.client.models.list().data
    assert (model.id, model.object) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "model")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == CONTEXT_TOKENS
    assert openai_app.client.models.retrieve(model.id) == model


def test_an_answer_up_to_its_own_end(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.chat_prompt(CAPITAL)
    expected = reference.greedy(prompt, 32)
    assert expected[-1] == reference.eos
    answer = openai_app.chat(CAPITAL, max_tokens=32)
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", openai_app.model)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.content == reference.text(expected) == "The capital of France is Paris."
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(expected))
    assert usage.total_tokens == len(prompt) + len(expected)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_an_answer_cut_at_its_limit(
    openai_app: OpenAIApp, reference: ReferenceText, limit: str, num_tokens: int
) -> None:
    expected = reference.greedy(reference.chat_prompt(FRENCH), 9)[:num_tokens]
    answer = openai_app.chat(FRENCH, **{limit: num_tokens})
    assert (text_of(answer), answer.choices[0].finish_reason) == (reference.text(expected), "length")
    assert answer.usage.completion_tokens == num_tokens


def test_a_dialogue_with_a_system_message(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.chat_prompt(DIALOGUE)
    answer = openai_app.chat(DIALOGUE, max_tokens=12)
    assert text_of(answer) == reference.text(reference.greedy(prompt, 12))
    assert answer.usage.prompt_tokens == len(prompt)


def test_text_parts_are_one_text(openai_app: OpenAIApp) -> None:
    parts: Messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say hello"}, {"type": "text", "text": "in French."}]}
    ]
    assert text_of(openai_app.chat(parts, max_tokens=8)) == text_of(
        openai_app.chat("Say hello\nin French.", max_tokens=8)
    )


def test_going_on_with_a_begun_answer(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    begun: Messages = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The capital of"}]
    prompt = reference.chat_prompt(begun, add_generation_prompt=False, continue_final_message=True)
    answer = openai_app.chat(begun, max_tokens=4, add_generation_prompt=False, continue_final_message=True)
    assert text_of(answer) == reference.text(reference.greedy(prompt, 4))
    assert text_of(answer).startswith(" France")


def test_a_second_turn_finds_the_first_ones_prompt_cached(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    salt = fresh_salt()
    messages: Messages = [{"role": "user", "content": FRENCH}]
    first = openai_app.chat(messages, max_tokens=8, cache_salt=salt)
    assert cached_tokens(first) == 0
    again = openai_app.chat(messages, max_tokens=8, cache_salt=salt)
    assert text_of(again) == text_of(first)
    assert cached_tokens(again) == (again.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0

    messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "Thank you."}]
    second = openai_app.chat(messages, max_tokens=8, cache_salt=salt)
    assert text_of(second) == reference.text(reference.greedy(reference.chat_prompt(messages), 8))
    assert cached_tokens(again) <= cached_tokens(second) < second.usage.prompt_tokens


def test_ignoring_the_end(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    expected = reference.greedy(reference.chat_prompt(CAPITAL), 14, eos_token_id=None)
    assert reference.eos in expected[:-1]
    answer = openai_app.chat(CAPITAL, max_tokens=14, ignore_eos=True)
    assert (text_of(answer), answer.choices[0].finish_reason) == (reference.text(expected), "length")
    shown = openai_app.chat(CAPITAL, max_tokens=14, ignore_eos=True, skip_special_tokens=False)
    assert text_of(shown) == reference.tokenizer.decode(expected)


def test_prompt_and_answer_share_the_context(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.chat_prompt(CAPITAL)
    expected = reference.text(reference.greedy(prompt, 32))
    room = CONTEXT_TOKENS - len(prompt)
    assert text_of(openai_app.chat(CAPITAL, max_tokens=room)) == expected
    assert text_of(openai_app.chat(CAPITAL)) == expected  # no limit: as much as fits
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as caught:
        openai_app.chat(CAPITAL, max_tokens=room + 1)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("options", "distinct"), [({}, 1), ({"temperature": 1.5}, 4), ({"temperature": 1.5, "seed": 7}, 4)]
)
def test_several_answers(openai_app: OpenAIApp, options: dict[str, Any], distinct: int) -> None:
    answer = openai_app.chat(FRENCH, n=4, max_tokens=12, ignore_eos=True, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) == distinct
    one = openai_app.chat(FRENCH, max_tokens=1)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens  # once, not four times
    assert answer.usage.completion_tokens == 4 * 12


def test_the_other_answers_find_the_prompt_of_the_first(openai_app: OpenAIApp) -> None:
    prefill_before = openai_app.app.total("computed_prompt_tokens", "prefill")
    answer = openai_app.chat(FRENCH, n=4, max_tokens=4, cache_salt=fresh_salt())
    computed = openai_app.app.total("computed_prompt_tokens", "prefill") - prefill_before
    assert cached_tokens(answer) == 0
    assert computed <= answer.usage.prompt_tokens + 3 * BLOCK_TOKENS


def test_a_seed_decides_the_answer(openai_app: OpenAIApp) -> None:
    options = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    first, again, other, unseeded = (
        text_of(openai_app.chat(FRENCH, **options, **seed)) for seed in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {})
    )
    assert first == again
    assert len({first, other, unseeded}) == 3


def test_a_seed_decides_all_answers_and_not_how_many_there_are(openai_app: OpenAIApp) -> None:
    options = {"max_tokens": 8, "temperature": 1.5, "ignore_eos": True, "seed": 3}
    three = [choice.message.content for choice in openai_app.chat(FRENCH, n=3, **options).choices]
    two = [choice.message.content for choice in openai_app.chat(FRENCH, n=2, **options).choices]
    assert three[:2] == two
    assert len(set(three)) == 3


def test_a_nearly_cold_temperature_is_greedy(openai_app: OpenAIApp) -> None:
    assert text_of(openai_app.chat(FRENCH, max_tokens=8, temperature=1e-6)) == text_of(
        openai_app.chat(FRENCH, max_tokens=8)
    )
    one_token = openai_app.chat(FRENCH, max_tokens=8, temperature=2.0, top_k=1)
    assert text_of(one_token) == text_of(openai_app.chat(FRENCH, max_tokens=8))
