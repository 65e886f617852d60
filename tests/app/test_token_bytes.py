from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from app.token_bytes import TokenBytes


def decode(tokenizer: Any, ids: list[int], *, skip: bool) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.WordPiece(), "WordPiece"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Fuse . Strip"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("▁", " ")]),
            "Strip . Replace",
        ),
        (None, "none"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, named: str) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match=rf"decoder \(.*{named}\) is not supported"):
        TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="not a fast tokenizer"):
        TokenBytes(object())


def test_bytes_of_every_token_are_those_that_decode_joins(byte_level_tokenizer: Any) -> None:
    table = TokenBytes(byte_level_tokenizer)
    for token_id in range(len(byte_level_tokenizer)):
        alone = decode(byte_level_tokenizer, [token_id], skip=False)
        assert table.of(token_id).decode(errors="replace") == alone
        if "\ufffd" not in alone:
            assert table.text(token_id) == alone


def test_tokens_that_are_no_whole_characters_are_spelled_in_bytes(
    byte_level_tokenizer: Any, byte_fallback_tokenizer: Any
) -> None:
    table = TokenBytes(byte_fallback_tokenizer)
    half = byte_fallback_tokenizer.convert_tokens_to_ids("<0xE4>")
    assert (table.of(half), table.text(half)) == (b"\xe4", "bytes:\\xe4")
    newline = byte_fallback_tokenizer.convert_tokens_to_ids("<0x0A>")
    assert (table.of(newline), table.text(newline)) == (b"\n", "\n")
    word = byte_fallback_tokenizer.convert_tokens_to_ids("▁The")
    assert table.text(word) == " The"
    texts = [TokenBytes(byte_level_tokenizer).text(token_id) for token_id in range(len(byte_level_tokenizer))]
    assert len(set(texts)) == len(texts)


def test_an_id_outside_the_vocabulary_has_no_bytes(byte_level_tokenizer: Any) -> None:
    assert TokenBytes(byte_level_tokenizer).of(10**6) == b""
    assert not TokenBytes(byte_level_tokenizer).is_special(10**6)


@pytest.mark.model
def test_bytes_of_every_token_of_the_default_model(default_tokenizer: Any) -> None:
    table = TokenBytes(default_tokenizer)
    for token_id in range(len(default_tokenizer)):
        alone = decode(default_tokenizer, [token_id], skip=False)
        assert table.of(token_id).decode(errors="replace") == alone
