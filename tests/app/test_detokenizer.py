from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from app.detokenizer import IncrementalDetokenizer
from app.token_bytes import TokenBytes

SMALL = ["byte_level_tokenizer", "byte_fallback_tokenizer", "metaspace_tokenizer"]
SAMPLES = [
    "",
    " ",
    "  leading and  double spaces ",
    "plain text, with punctuation!",
    "newlines\n\n\tand tabs\r\n",
    "你好，世界 and 日本語のテキスト",
    "emoji 😀👍🏽 and families 👨‍👩‍👧‍👦 and flags 🏳️‍🌈🇩🇪",
    "combining e\u0301 and \u200d joiners",
    "العربية עברית हिन्दी አማርኛ ภาษาไทย",
    "a literal \ufffd, a ▁ and a <0x41>",
    "control \x00\x01\x7f\u0085\u2028 characters",
]

# The fixtures hold no state that an example could change.
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def table_of(tokenizer: Any) -> TokenBytes:
    return TokenBytes(tokenizer)


def pieces(tokenizer: Any, ids: list[int], *, skip: bool = True, after_text: bool = False) -> list[str]:
    detokenizer = IncrementalDetokenizer(table_of(tokenizer), skip_special_tokens=skip, after_text=after_text)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def decode(tokenizer: Any, ids: list[int], *, skip: bool = True) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(params=SMALL)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("skip", [True, False])
def test_pieces_join_to_the_decoded_text(tokenizer: Any, text: str, skip: bool) -> None:
    ids = encode(tokenizer, text)
    assert "".join(pieces(tokenizer, ids, skip=skip)) == decode(tokenizer, ids, skip=skip)


@quick
@given(text=st.text(max_size=60))
def test_any_text_comes_back_as_decode_gives_it(tokenizer: Any, text: str) -> None:
    ids = encode(tokenizer, text)
    got = pieces(tokenizer, ids)
    assert "".join(got) == decode(tokenizer, ids)
    if "\ufffd" not in decode(tokenizer, ids):
        assert not any("\ufffd" in piece for piece in got)


def without_incomplete_tail(tokenizer: Any, ids: list[int], byte_ids: dict[int, int], skip: bool) -> str:
    """`decode`, less a last U+FFFD that some continuation bytes would have turned to a character."""
    text = decode(tokenizer, ids, skip=skip)
    if text.endswith("\ufffd"):
        for length in (1, 2, 3):
            for continuation in product((0x80, 0x90, 0xA0), repeat=length):
                longer = decode(tokenizer, [*ids, *(byte_ids[byte] for byte in continuation)], skip=skip)
                if longer[len(text) - 1] != "\ufffd":
                    return text[:-1]
    return text


INTERESTING_BYTES = [0x20, 0x61, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBD, 0xBF, 0xC0, 0xC2, 0xE0, 0xE4, 0xED, 0xEF]
INTERESTING_BYTES += [0xF0, 0xF4, 0xF5, 0xFF]


@quick
@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_of_a_byte_level_vocabulary(byte_level_tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    tokenizer = byte_level_tokenizer
    byte_ids = ids_of_bytes(tokenizer)
    assert len(byte_ids) == 256
    bad = st.sampled_from([byte_ids[byte] for byte in INTERESTING_BYTES])
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 3) | bad, max_size=24))
    want = without_incomplete_tail(tokenizer, ids, byte_ids, skip)
    assert "".join(pieces(tokenizer, ids, skip=skip)) == want


@cache
def ids_of_bytes(tokenizer: Any) -> dict[int, int]:
    table = table_of(tokenizer)
    return {table.of(token_id)[0]: token_id for token_id in range(len(tokenizer)) if len(table.of(token_id)) == 1}


@quick
@given(data=st.data())
def test_text_comes_as_soon_as_it_is_complete(byte_level_tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(byte_level_tokenizer) - 1), max_size=20))
    got = pieces(byte_level_tokenizer, ids)
    for length in range(len(ids) + 1):
        text = decode(byte_level_tokenizer, ids[:length])
        if not text.endswith("\ufffd"):
            assert "".join(got[:length]) == text


@quick
@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_of_a_metaspace_vocabulary(metaspace_tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, len(metaspace_tokenizer) + 3), max_size=24))
    assert "".join(pieces(metaspace_tokenizer, ids, skip=skip)) == decode(metaspace_tokenizer, ids, skip=skip)


def spelled_out(tokenizer: Any, ids: list[int], skip: bool) -> str:
    """Llama 2's decoder by hand: good characters of a run of byte tokens as they are, each bad byte U+FFFD."""
    text, run = "", b""
    for token in tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=skip):
        if token is not None and token.startswith("<0x"):
            run += bytes.fromhex(token[3:5])
        elif token is not None:
            text, run = text + characters(run, last=False) + token.replace("▁", " "), b""
    text += characters(run, last=True)
    return text.removeprefix(" ")


def characters(run: bytes, *, last: bool) -> str:
    text, position = "", 0
    while position < len(run):
        for length in (1, 2, 3, 4):
            try:
                text += run[position : position + length].decode()
            except UnicodeDecodeError:
                continue
            position += length
            break
        else:
            if last and completable(run[position:]):
                return text
            text += "\ufffd"
            position += 1
    return text


def completable(tail: bytes) -> bool:
    continuations = [bytes(more) for length in (1, 2, 3) for more in product((0x80, 0x90, 0xA0), repeat=length)]
    for more in continuations:
        try:
            if len((tail + more).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


@quick
@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_with_byte_fallback(byte_fallback_tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    tokenizer = byte_fallback_tokenizer
    byte_tokens = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in INTERESTING_BYTES]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1) | st.sampled_from(byte_tokens), max_size=24))
    assert "".join(pieces(tokenizer, ids, skip=skip)) == spelled_out(tokenizer, ids, skip)


def test_byte_tokens_give_their_character_when_it_is_complete(byte_fallback_tokenizer: Any) -> None:
    ids = [byte_fallback_tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "你😀".encode()]
    assert pieces(byte_fallback_tokenizer, ids) == ["", "", "你", "", "", "", "😀", ""]


def test_a_character_that_is_never_completed_is_dropped(byte_level_tokenizer: Any) -> None:
    face = encode(byte_level_tokenizer, "😺")
    assert len(face) > 1
    cut = [*encode(byte_level_tokenizer, "cat "), *face[:-1]]
    assert decode(byte_level_tokenizer, cut).endswith("\ufffd")
    assert "".join(pieces(byte_level_tokenizer, cut)) == "cat "


def test_bytes_that_nothing_could_complete_are_not_dropped(byte_level_tokenizer: Any) -> None:
    """ED A0 would begin a surrogate, which UTF-8 does not have."""
    byte_ids = ids_of_bytes(byte_level_tokenizer)
    ids = [byte_ids[0x61], byte_ids[0xED], byte_ids[0xA0]]
    assert "".join(pieces(byte_level_tokenizer, ids)) == decode(byte_level_tokenizer, ids) == "a\ufffd\ufffd"


def test_special_and_added_tokens_in_the_middle(byte_level_tokenizer: Any) -> None:
    tokenizer = byte_level_tokenizer
    ids = encode(tokenizer, "one<|eos|><tool call> two<｜ask▁user｜>")
    assert tokenizer.eos_token_id in ids
    assert "".join(pieces(tokenizer, ids)) == "one<tool call> two<｜ask▁user｜>"
    assert "".join(pieces(tokenizer, ids, skip=False)) == "one<|eos|><tool call> two<｜ask▁user｜>"


def test_special_tokens_that_are_to_be_shown(byte_level_tokenizer: Any) -> None:
    tokenizer = byte_level_tokenizer
    detokenizer = IncrementalDetokenizer(TokenBytes(tokenizer), shown_ids={tokenizer.eos_token_id})
    text = "".join(map(detokenizer.push, encode(tokenizer, "one<|eos|><|bos|> two")))
    assert text + detokenizer.finish() == "one<|eos|> two"


def test_a_skipped_special_token_within_a_character(byte_level_tokenizer: Any) -> None:
    first, *rest = encode(byte_level_tokenizer, "😺")
    ids = [first, byte_level_tokenizer.eos_token_id, *rest]
    assert "".join(pieces(byte_level_tokenizer, ids)) == decode(byte_level_tokenizer, ids) == "😺"


@pytest.mark.parametrize("name", ["byte_fallback_tokenizer", "metaspace_tokenizer"])
def test_the_leading_space_goes_only_at_the_start_of_a_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    prompt, answer = encode(tokenizer, "The quick"), encode(tokenizer, "brown fox")
    assert "".join(pieces(tokenizer, answer)) == "brown fox"
    whole = decode(tokenizer, [*prompt, *answer])
    assert whole == "The quick brown fox"
    assert "".join(pieces(tokenizer, answer, after_text=True)) == whole.removeprefix(decode(tokenizer, prompt))


def test_a_leading_space_after_skipped_special_tokens(byte_fallback_tokenizer: Any) -> None:
    tokenizer = byte_fallback_tokenizer
    ids = [tokenizer.bos_token_id, *encode(tokenizer, "fox"), tokenizer.eos_token_id, *encode(tokenizer, "dog")]
    assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids) == "fox dog"
    assert "".join(pieces(tokenizer, ids, skip=False)) == decode(tokenizer, ids, skip=False) == "<s> fox</s> dog"


def test_a_decoder_that_replaces_after_joining() -> None:
    """The order that some converted checkpoints have: bytes first, then "▁" in the joined text."""
    backend = Tokenizer(models.BPE({"▁a": 0, "b": 1, "▁": 2, "<0xE4>": 3, "<0xBD>": 4, "<0xA0>": 5, "▁▁": 6}, []))
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for ids in ([0, 1, 2, 0], [2, 2, 1], [3, 4, 5, 0], [2], [6, 1], [6], []):
        assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


def test_a_metaspace_decoder_that_keeps_the_leading_space() -> None:
    backend = Tokenizer(models.BPE({"▁a": 0, "▁": 1, "b": 2}, []))
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for ids in ([0, 2], [1, 0], [2, 0]):
        assert "".join(pieces(tokenizer, ids)) == decode(tokenizer, ids)


@pytest.mark.model
@pytest.mark.parametrize("text", SAMPLES)
def test_the_default_model(default_tokenizer: Any, text: str) -> None:
    ids = encode(default_tokenizer, text)
    assert "".join(pieces(default_tokenizer, ids)) == decode(default_tokenizer, ids)


@pytest.mark.model
@quick
@given(data=st.data(), skip=st.booleans())
def test_any_token_ids_of_the_default_model(default_tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, len(default_tokenizer) - 1), max_size=24))
    want = without_incomplete_tail(default_tokenizer, ids, ids_of_bytes(default_tokenizer), skip)
    assert "".join(pieces(default_tokenizer, ids, skip=skip)) == want
