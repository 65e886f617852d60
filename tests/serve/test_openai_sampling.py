"""What changes the choice of tokens, through the running app, against transformers or the published formula. The first
token is chosen on the prefill worker, the others on the decode worker, which must know of it."""

from __future__ import annotations

import pytest
import torch

from tests.openai_app import OpenAIApp, text_of
from tests.reference_text import ReferenceText

pytestmark = [pytest.mark.cluster, pytest.mark.model]

REPEATING = "red green red green red green red green"
TOKENS = 10


@pytest.fixture(scope="module")
def prompt(reference: ReferenceText) -> list[int]:
    return list(reference.tokenizer.encode(REPEATING))


@pytest.fixture(scope="module")
def plain(reference: ReferenceText, prompt: list[int]) -> str:
    """The answer that nothing changes."""
    return reference.text(reference.greedy(prompt, TOKENS))


def test_a_repetition_penalty_counts_prompt_and_answer(
    openai_app: OpenAIApp, reference: ReferenceText, prompt: list[int], plain: str
) -> None:
    expected = reference.text(reference.greedy(prompt, TOKENS, repetition_penalty=1.3))
    assert expected != plain
    assert text_of(openai_app.complete(prompt, max_tokens=TOKENS, repetition_penalty=1.3)) == expected


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.0), (0.0, 2.0), (0.7, 1.1), (-2.0, 0.0)])
def test_frequency_and_presence_penalties_count_the_answer_alone(
    openai_app: OpenAIApp, reference: ReferenceText, prompt: list[int], plain: str, frequency: float, presence: float
) -> None:
    def edit(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(logits))
        return logits - counts * frequency - (counts > 0) * presence

    expected = reference.text(reference.greedy_with(prompt, TOKENS, edit))
    if frequency > 0 or presence > 0:
        assert expected != plain
    answer = openai_app.complete(prompt, max_tokens=TOKENS, frequency_penalty=frequency, presence_penalty=presence)
    assert text_of(answer) == expected


def test_a_bias_forces_a_token(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    (token,) = reference.tokenizer.encode(" banana")
    answer = openai_app.complete(REPEATING, max_tokens=4, logit_bias={str(token): 100})
    assert text_of(answer) == " banana" * 4
    sampled = openai_app.complete(REPEATING, max_tokens=4, logit_bias={str(token): 100}, temperature=2.0)
    assert text_of(sampled) == " banana" * 4


def test_a_bias_forbids_a_token(openai_app: OpenAIApp, reference: ReferenceText, prompt: list[int], plain: str) -> None:
    banned = reference.greedy(prompt, 2)

    def edit(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        logits[banned] -= 100
        return logits

    expected = reference.text(reference.greedy_with(prompt, TOKENS, edit))
    assert expected != plain
    answer = openai_app.complete(prompt, max_tokens=TOKENS, logit_bias={str(token): -100 for token in banned})
    assert text_of(answer) == expected


def test_all_of_them_together(openai_app: OpenAIApp, reference: ReferenceText, prompt: list[int]) -> None:
    (token,) = reference.tokenizer.encode(" blue")

    def edit(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
        seen = torch.tensor([*prompt, *answer]).unique()
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * 1.2, logits[seen] / 1.2)
        counts = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=len(logits))
        logits = logits - counts * 0.5 - (counts > 0) * 0.5
        logits[token] += 6.0
        return logits

    answer = openai_app.complete(
        prompt, max_tokens=TOKENS, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5,
        logit_bias={str(token): 6.0},
    )  # fmt: skip
    assert text_of(answer) == reference.text(reference.greedy_with(prompt, TOKENS, edit))


@pytest.mark.parametrize("least", [1, 9, 12])
def test_an_answer_of_a_least_length(openai_app: OpenAIApp, reference: ReferenceText, least: int) -> None:
    question = "What is the capital of France?"
    prompt = reference.chat_prompt(question)
    assert len(reference.greedy(prompt, 32)) == 8  # by itself
    expected = reference.greedy(prompt, 14, min_new_tokens=least)
    answer = openai_app.chat(question, max_tokens=14, min_tokens=least)
    assert text_of(answer) == reference.text(expected)
    assert answer.usage.completion_tokens == len(expected)


def test_stop_tokens_wait_for_the_least_length_too(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.tokenizer.encode("1, 2, 3, 4,")
    space, five, comma = reference.greedy(prompt, 3)
    free = openai_app.complete(prompt, max_tokens=6, stop_token_ids=[comma])
    assert (text_of(free), free.usage.completion_tokens) == (" 5", 3)
    held = openai_app.complete(prompt, max_tokens=6, stop_token_ids=[comma], min_tokens=4)
    assert held.usage.completion_tokens >= 4
    assert text_of(held).startswith(reference.text([space, five]))
    assert "," not in text_of(held)


def test_settings_at_their_off_values_change_nothing(openai_app: OpenAIApp, prompt: list[int], plain: str) -> None:
    answer = openai_app.complete(
        prompt, max_tokens=TOKENS, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, logit_bias={}, min_tokens=0, stop=[], stop_token_ids=[], n=1, best_of=1, seed=1,
        user="somebody",
    )  # fmt: skip
    assert text_of(answer) == plain


@pytest.mark.parametrize("option", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_filters_down_to_one_token_are_greedy(
    openai_app: OpenAIApp, prompt: list[int], plain: str, option: dict[str, float]
) -> None:
    assert text_of(openai_app.complete(prompt, max_tokens=TOKENS, temperature=2.0, **option)) == plain
