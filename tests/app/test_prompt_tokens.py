from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from app.chat_protocol import ChatCompletionRequest
from app.completion_protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from app.openai_errors import ApiError
from app.openai_protocol import GenerationRequest
from app.prompt_tokens import answer_tokens, encode_prompt


def chat(**changes: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **changes}
    )


def completion(**changes: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "hello", **changes})


@pytest.fixture
def bos_tokenizer() -> Any:
    """Adds BOS to a text; drops "\\x00"."""
    backend = Tokenizer(models.WordLevel({"<s>": 0, "hello": 1, "?": 2}, unk_token="?"))
    backend.normalizer = normalizers.Replace("\x00", "")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


def test_text_gets_the_special_tokens_of_the_tokenizer(bos_tokenizer: Any) -> None:
    assert encode_prompt(bos_tokenizer, "hello", vocab_size=3) == (0, 1)


def test_token_ids_are_taken_as_they_are(bos_tokenizer: Any) -> None:
    assert encode_prompt(bos_tokenizer, (1, 2, 0, 1), vocab_size=3) == (1, 2, 0, 1)


@pytest.mark.parametrize("worst", [3, -1, 2**63, 10**4000, -(10**4000)])
def test_token_ids_outside_the_vocabulary(bos_tokenizer: Any, worst: int) -> None:
    with pytest.raises(ApiError, match=r"It must be from 0 to 2\.") as caught:
        encode_prompt(bos_tokenizer, (1, worst, 2), vocab_size=3)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == "prompt"
    assert len(str(caught.value)) < 200


def test_text_that_gives_no_tokens() -> None:
    backend = Tokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(ApiError, match="no tokens at all") as caught:
        encode_prompt(PreTrainedTokenizerFast(tokenizer_object=backend), "\x00", vocab_size=1)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "default", "allowed"),
    [
        (chat(), 30, None, 70),
        (chat(), 99, None, 1),
        (chat(max_tokens=5), 30, None, 5),
        (chat(max_completion_tokens=70), 30, None, 70),
        (completion(), 30, DEFAULT_MAX_TOKENS, 16),
        (completion(), 90, DEFAULT_MAX_TOKENS, 10),
        (completion(max_tokens=70), 30, DEFAULT_MAX_TOKENS, 70),
        (completion(max_tokens=0, echo=True), 100, DEFAULT_MAX_TOKENS, 0),
    ],
)
def test_how_long_the_answer_may_be(
    request_: GenerationRequest, prompt_tokens: int, default: int | None, allowed: int
) -> None:
    got = answer_tokens(request_, prompt_tokens=prompt_tokens, context_tokens=100, default_tokens=default)
    assert got == allowed


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "param", "needs"),
    [
        (chat(), 100, "messages", "101: 100 in 'messages' and 1"),
        (chat(), 5000, "messages", "5001: 5000 in 'messages' and 1"),
        (chat(max_tokens=71), 30, "messages", "101: 30 in 'messages' and 71"),
        (chat(max_tokens=2**31 - 1), 30, "messages", "2147483677"),
        (completion(max_tokens=71), 30, "prompt", "101: 30 in 'prompt' and 71"),
        (completion(max_tokens=0, echo=True), 101, "prompt", "101: 101 in 'prompt'. Shorten"),
    ],
)
def test_what_does_not_fit(request_: GenerationRequest, prompt_tokens: int, param: str, needs: str) -> None:
    with pytest.raises(ApiError, match=needs) as caught:
        answer_tokens(request_, prompt_tokens=prompt_tokens, context_tokens=100, default_tokens=16)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["code"] == "context_length_exceeded"
    assert caught.value.body()["error"]["param"] == param
