"""What valid requests mean: the engine's parameters, defaults and normalised fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from actors.engine.request import SamplingParams
from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import CompletionRequest
from app.default_sampling import DefaultSampling
from app.openai_errors import ApiError
from app.openai_protocol import NO_EFFECT, GenerationRequest, to_sampling
from app.request_parsing import parse_request


def chat(**changes: Any) -> ChatCompletionRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **changes}
    return parse_request(json.dumps(body).encode(), ChatCompletionRequest)


def completion(**changes: Any) -> CompletionRequest:
    return parse_request(json.dumps({"model": "tiny", "prompt": "hello", **changes}).encode(), CompletionRequest)


def sampling(request: GenerationRequest, **changes: Any) -> SamplingParams:
    return to_sampling(request, DefaultSampling(), **{"max_tokens": 7, "vocab_size": 100, "random_seed": 11, **changes})


@pytest.mark.parametrize("request_", [chat(), completion()])
def test_defaults(request_: GenerationRequest) -> None:
    assert sampling(request_) == SamplingParams(max_tokens=7, seed=11)
    assert request_.choices == 1
    assert request_.skips_special_tokens
    assert not request_.includes_usage


NULLABLE = sorted((ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()) - {"model"})


@pytest.mark.parametrize("field", [field for field in NULLABLE if field not in ("messages", "prompt")])
def test_null_means_the_default(field: str) -> None:
    make: Any = chat if field in ChatCompletionRequest.model_fields else completion
    assert sampling(make(**{field: None})) == SamplingParams(max_tokens=7, seed=11)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"temperature": 0}, "temperature", 0.0),
        ({"temperature": 1e-9}, "temperature", 0.0),
        ({"temperature": 0.01}, "temperature", 0.01),
        ({"temperature": 2}, "temperature", 2.0),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"top_k": 40}, "top_k", 40),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"repetition_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 2}, "frequency_penalty", 2.0),
        ({"logit_bias": {"7": -100, "3": 1.5}}, "logit_bias", ((3, 1.5), (7, -100.0))),
        ({"seed": 5}, "seed", 5),
        ({"seed": 0}, "seed", 0),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"seed": -(2**63)}, "seed", 2**63),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"stop_token_ids": [3, 99]}, "stop_token_ids", (3, 99)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"min_tokens": 7}, "min_tokens", 7),
    ],
)
def test_each_field_reaches_the_engine(given: dict[str, Any], field: str, value: Any) -> None:
    for request in (chat(**given), completion(**given)):
        want = SamplingParams(**{"max_tokens": 7, "seed": 11, field: value})
        assert sampling(request) == want


def test_choices_differ_by_their_index_only() -> None:
    request = chat(n=3, seed=5)
    assert request.choices == 3
    assert [sampling(request, choice_index=index).choice_index for index in range(3)] == [0, 1, 2]
    assert {sampling(request, choice_index=index).seed for index in range(3)} == {5}


@pytest.mark.parametrize(
    ("request_", "logprobs", "prompt_logprobs"),
    [
        (chat(logprobs=True), 0, None),
        (chat(logprobs=True, top_logprobs=20), 20, None),
        (chat(logprobs=False), None, None),
        (completion(logprobs=0), 0, None),
        (completion(logprobs=5), 5, None),
        (completion(logprobs=5, echo=True), 5, 5),
        (completion(echo=True), None, None),
        (completion(prompt_logprobs=3), None, 3),
        (completion(prompt_logprobs=3, logprobs=1), 1, 3),
        (completion(prompt_logprobs=3, logprobs=3, echo=True), 3, 3),
        (completion(prompt_logprobs=0, echo=True), None, 0),
        (chat(prompt_logprobs=2, logprobs=True), 0, 2),
    ],
)
def test_logprobs(request_: GenerationRequest, logprobs: int | None, prompt_logprobs: int | None) -> None:
    params = sampling(request_)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"logit_bias": {"100": 1}}, "logit_bias", "token id 100. It must be from 0 to 99"),
        ({"logit_bias": {"9999999999": 1}}, "logit_bias", "token id 9999999999"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids", "token id 100. It must be from 0 to 99"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token id -1. It must be from 0 to 99"),
        ({"stop_token_ids": [10**300]}, "stop_token_ids", "token id an integer of 997 bits"),
        ({"min_tokens": 8}, "min_tokens", "'min_tokens' is 8 and the answer may have 7 tokens"),
    ],
)
def test_what_the_vocabulary_or_the_context_rules_out(given: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        sampling(chat(**given))
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == param


@pytest.mark.parametrize("field", sorted(NO_EFFECT))
@pytest.mark.parametrize("value", ["text", True, {"type": "content"}])
def test_fields_of_openais_own_bookkeeping_have_no_effect(field: str, value: Any) -> None:
    assert chat(**{field: value}) == chat()
    assert completion(**{field: value}) == completion()


@pytest.mark.parametrize(
    "given",
    [
        {"functions": []},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"verbosity": "medium"},
    ],
)
def test_unsupported_fields_may_say_that_they_are_off(given: dict[str, Any]) -> None:
    assert chat(**given) == chat()


def test_an_empty_suffix_and_best_of_n_are_accepted() -> None:
    assert completion(suffix="") == completion()
    assert completion(best_of=3, n=3).choices == 3


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hello", "hello"),
        ("", ""),
        ([{"type": "text", "text": "hello"}], "hello"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_text_parts_are_joined(content: Any, text: str) -> None:
    request = chat(messages=[{"role": "user", "content": content}])
    assert request.messages[0].for_template() == {"role": "user", "content": text}


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
    }
    request = chat(messages=[answer, {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"}])
    assert [message.for_template() for message in request.messages] == [
        {"role": "assistant", "content": "hi"},
        {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"},
    ]


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({}, True),
        ({"add_generation_prompt": False}, False),
        ({"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True}, False),
    ],
)
def test_whether_the_template_opens_the_answer(given: dict[str, Any], begins: bool) -> None:
    assert chat(**given).begins_answer is begins


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 2**31 - 1}, 2**31 - 1),
    ],
)
def test_the_answers_length_in_chats(given: dict[str, Any], asked: int | None) -> None:
    assert chat(**given).max_new_tokens == asked


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2]], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [3]], ("a", (3,))),
    ],
)
def test_every_shape_of_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ()), (None, ())])
def test_stop_strings(stop: Any, stops: tuple[str, ...]) -> None:
    assert chat(stop=stop).stop == stops


def test_usage_in_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).includes_usage
    assert not chat(stream=True, stream_options={}).includes_usage
    assert not chat(stream=False, stream_options=None).includes_usage


def test_a_prompts_logprobs_do_not_come_in_a_stream() -> None:
    with pytest.raises(ApiError, match="whole answer only"):
        chat(prompt_logprobs=1, stream=True)
    assert chat(prompt_logprobs=1, stream=False).prompt_logprob_count == 1


def test_scoring_a_prompt_without_an_answer() -> None:
    request = completion(max_tokens=0, echo=True, logprobs=2)
    assert request.max_new_tokens == 0
    assert sampling(request, max_tokens=0).prompt_logprobs == 2
