"""Stop strings and stop tokens in the running app, at every place in an answer. The first token comes from the prefill
worker, the others from the decode worker."""

from __future__ import annotations

import pytest

from tests.openai_app import OpenAIApp, text_of
from tests.reference_text import ReferenceText
from tests.running_app import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

STORY = "Once upon a time there was a little"
TOKENS = 12


@pytest.fixture(scope="module")
def pieces(reference: ReferenceText) -> list[str]:
    """The text of each token of the answer."""
    answer = reference.greedy(reference.tokenizer.encode(STORY), TOKENS)
    pieces = [reference.tokenizer.decode([token]) for token in answer]
    assert pieces[:4] == [" girl", " named", " Emma", " who"]
    return pieces


@pytest.mark.parametrize(
    ("stop", "kept", "tokens"),
    [
        (" girl", "", 1),  # all of the first token
        ("ir", " g", 1),  # within it
        ("l n", " gir", 2),  # across the border of prefill and decode
        ("girl named Emma who", " ", 4),  # over several tokens
        ("med", " girl na", 2),
        ("Emma", " girl named ", 3),
        (["nowhere", "d E", "who lived"], " girl name", 3),  # the first that is complete, whatever the order
        (["girl named Emma was", "named Emma"], " girl ", 3),  # one that began earlier and was not completed
        (["Emma", " named Emma"], " girl", 3),  # both end here: the longer one is cut off
    ],
)
def test_an_answer_ends_before_its_stop_string(
    openai_app: OpenAIApp, pieces: list[str], stop: str | list[str], kept: str, tokens: int
) -> None:
    answer = openai_app.complete(STORY, max_tokens=TOKENS, stop=stop)
    assert (text_of(answer), answer.choices[0].finish_reason) == (kept, "stop")
    assert answer.usage.completion_tokens == tokens


def test_a_stop_string_may_be_kept(openai_app: OpenAIApp) -> None:
    answer = openai_app.complete(STORY, max_tokens=TOKENS, stop="l na", include_stop_str_in_output=True)
    assert (text_of(answer), answer.choices[0].finish_reason) == (" girl na", "stop")


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_stop_string_that_is_not_completed_ends_nothing(
    openai_app: OpenAIApp, pieces: list[str], tokens: int
) -> None:
    text = "".join(pieces[:tokens])
    answer = openai_app.complete(STORY, max_tokens=tokens, stop=[text[1:] + "!", text[-1] + "ZZZ"])
    assert (text_of(answer), answer.choices[0].finish_reason) == (text, "length")


def test_a_stop_string_in_the_prompt_ends_nothing(openai_app: OpenAIApp, pieces: list[str]) -> None:
    answer = openai_app.complete(STORY, max_tokens=3, stop=["little", "tle gi"], echo=True)
    assert (text_of(answer), answer.choices[0].finish_reason) == (STORY + "".join(pieces[:3]), "length")


def test_a_stop_string_in_a_chat(openai_app: OpenAIApp) -> None:
    question = "What is the capital of France?"
    assert text_of(openai_app.chat(question)) == "The capital of France is Paris."
    answer = openai_app.chat(question, stop=["is Par", "Lyon"])
    assert (text_of(answer), answer.choices[0].finish_reason) == ("The capital of France ", "stop")
    first = openai_app.chat(question, stop="The")
    assert (text_of(first), first.choices[0].finish_reason) == ("", "stop")
    assert first.usage.completion_tokens == 1


def test_a_stop_string_of_characters_in_parts(openai_app: OpenAIApp, reference: ReferenceText) -> None:
    prompt = reference.tokenizer.encode("😀😃😄😀😃😄😀😃😄")
    whole = reference.text(reference.greedy(prompt, TOKENS))
    assert whole.startswith("😄😄")
    assert len(reference.tokenizer.encode("😄")) > 1
    answer = openai_app.complete(prompt, max_tokens=TOKENS, stop="😄😄")
    assert (text_of(answer), answer.choices[0].finish_reason) == ("", "stop")


def test_each_choice_stops_by_itself(openai_app: OpenAIApp) -> None:
    answer = openai_app.complete([STORY, "1, 2, 3, 4,"], n=2, max_tokens=8, stop=[" Emma", " 6"])
    assert [choice.text for choice in answer.choices] == [" girl named"] * 2 + [" 5,"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_stop_token(openai_app: OpenAIApp, reference: ReferenceText, pieces: list[str], place: int) -> None:
    tokens = reference.greedy(reference.tokenizer.encode(STORY), TOKENS)
    answer = openai_app.complete(STORY, max_tokens=TOKENS, stop_token_ids=[7, tokens[place]])
    assert (text_of(answer), answer.choices[0].finish_reason) == ("".join(pieces[:place]), "stop")
    assert answer.usage.completion_tokens == place + 1


def test_a_first_token_that_ends_the_answer_troubles_no_decode_worker(openai_app: OpenAIApp) -> None:
    app = openai_app.app
    steps = app.total("steps", "decode")
    for stop in (" girl", "ir"):
        openai_app.complete(STORY, max_tokens=TOKENS, stop=stop)
    openai_app.complete(STORY, max_tokens=1)
    assert app.total("steps", "decode") == steps
    wait_until(lambda: app.total("live_blocks") == 0, 10.0, "a worker kept blocks")
