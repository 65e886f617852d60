"""Tokenizers (small ones of each family, made on the spot, and the default model's) and bad requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from app.openai_errors import ApiError
from app.openai_protocol import GenerationRequest
from app.request_parsing import parse_request

LINES = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind, and the fox jumps again.",
    "def add(a, b):\n    return a + b  # adds two numbers\n",
    "Grüße aus Köln: schöne Straßen, heiße Öfen.",
    "你好，世界。今天天气很好，我们去公园。",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 naïve café, 1 2 3  two  spaces",
]


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Any:
    """Byte-level BPE with special tokens and with added tokens that are none (one of them outside the alphabet)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("<｜ask▁user｜>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>")


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Any:
    """SentencePiece style, as Llama 2: "▁" for spaces, `<0xNN>` for unknown bytes, one leading space stripped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # to learn words; the finished tokenizer has none
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LINES[:3], trainer)
    description = json.loads(tokenizer.to_str())
    vocabulary = description["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    description["model"]["byte_fallback"] = True
    description["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=False
    )


@pytest.fixture(scope="session")
def metaspace_tokenizer() -> Any:
    """SentencePiece style, as T5: a Metaspace decoder, which drops the first token's "▁"."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="session")
def default_tokenizer() -> Any:
    """The default model's tokenizer. Tests that use it carry the mark `model`."""
    from transformers import AutoTokenizer

    from actors.model_source import ensure_default_model

    return AutoTokenizer.from_pretrained(ensure_default_model())


@pytest.fixture(scope="session")
def refused() -> Callable[[bytes, type[GenerationRequest]], dict[str, Any]]:
    """The error of a request's body that must be refused, checked for its whole form."""

    def check(body: bytes, request_type: type[GenerationRequest]) -> dict[str, Any]:
        with pytest.raises(ApiError) as caught:
            parse_request(body, request_type)
        assert caught.value.status == 400
        answer = json.loads(json.dumps(caught.value.body()))
        assert answer.keys() == {"error"}
        error: dict[str, Any] = answer["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["code"]
        assert 0 < len(error["message"]) < 600
        return error

    return check
