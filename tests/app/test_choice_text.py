from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from actors.engine.request import FINISH_LENGTH, FINISH_STOP, TokenEvent, TokenLogprobs
from app.choice_text import ChoiceText, Piece
from app.token_bytes import TokenBytes

TEXT = "The quick 再见 fox 🦊 jumps, naïve"


def choice(tokenizer: Any, stops: Sequence[str] = (), **options: Any) -> ChoiceText:
    defaults = {"include_stop": False, "skip_special_tokens": True, "echoed_prompt": None, "after_text": False}
    return ChoiceText(3, TokenBytes(tokenizer), stops, **defaults | options)


def events(token_ids: Sequence[int], finish_reason: str | None = FINISH_LENGTH) -> list[TokenEvent]:
    """One event a token; the last one finishes."""
    last = len(token_ids) - 1
    return [
        TokenEvent("r", token_id, finish_reason if position == last else None, logprobs=scored(token_id))
        for position, token_id in enumerate(token_ids)
    ]


def scored(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.25 * token_id)


def taken(text: ChoiceText, given: Sequence[TokenEvent]) -> list[Piece]:
    """The pieces up to the end of the choice, as whoever runs it stops there."""
    pieces = []
    for event in given:
        pieces.append(text.take(event))
        if text.ended:
            break
    assert [piece.index for piece in pieces] == [3] * len(pieces)
    assert [piece.finish_reason is not None for piece in pieces] == [False] * (len(pieces) - 1) + [text.ended]
    return pieces


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_pieces_join_to_the_decoded_text_and_none_breaks_a_character(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode(TEXT)
    assert any("\ufffd" in byte_level_tokenizer.decode([token_id]) for token_id in token_ids)  # parts of characters
    text = choice(byte_level_tokenizer)
    pieces = taken(text, events(token_ids))
    assert joined(pieces) == TEXT
    assert pieces[-1].finish_reason == "length"
    assert text.completion_tokens == len(token_ids)
    assert [token for piece in pieces for token in piece.token_ids] == token_ids
    assert [entry for piece in pieces for entry in piece.logprobs] == list(map(scored, token_ids))


def test_an_answer_that_is_cut_within_a_character(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode("to 再")
    pieces = taken(choice(byte_level_tokenizer), events(token_ids[:-1]))
    assert joined(pieces) == "to "


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_stop_string_anywhere_ends_the_text_before_it(byte_level_tokenizer: Any, size: int) -> None:
    token_ids = byte_level_tokenizer.encode(TEXT)
    so_far = [byte_level_tokenizer.decode(token_ids[:count]) for count in range(len(token_ids) + 1)]
    for start in range(len(TEXT) - size + 1):
        stop = TEXT[start : start + size]
        text = choice(byte_level_tokenizer, [stop])
        pieces = taken(text, events(token_ids))
        assert joined(pieces) == TEXT[: TEXT.index(stop)]
        assert pieces[-1].finish_reason == "stop"
        # The token that completed the stop string is the last that counts.
        assert text.completion_tokens == next(count for count, known in enumerate(so_far) if stop in known)


def test_the_first_of_several_stop_strings_counts(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode(TEXT)
    pieces = taken(choice(byte_level_tokenizer, ["jumps", "fox 🦊", "zebra"]), events(token_ids))
    assert joined(pieces) == "The quick 再见 "


def test_a_stop_string_can_be_part_of_the_answer(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode(TEXT)
    pieces = taken(choice(byte_level_tokenizer, ["fox 🦊"], include_stop=True), events(token_ids))
    assert joined(pieces) == "The quick 再见 fox 🦊"
    assert pieces[-1].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_that_never_came_is_sent_at_the_end(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode("a quick fox")
    pieces = taken(choice(byte_level_tokenizer, ["quick foxes"]), events(token_ids))
    assert joined(pieces[:-1]) == "a "
    assert joined(pieces) == "a quick fox"
    assert pieces[-1].finish_reason == "length"


def test_the_token_that_ends_an_answer_is_counted_and_is_no_text(byte_level_tokenizer: Any) -> None:
    token_ids = [*byte_level_tokenizer.encode("a quick fox"), byte_level_tokenizer.eos_token_id]
    text = choice(byte_level_tokenizer, ["quick foxes"])
    pieces = taken(text, events(token_ids, FINISH_STOP))
    assert (joined(pieces), pieces[-1].finish_reason) == ("a quick fox", "stop")
    assert text.completion_tokens == len(token_ids)
    assert pieces[-1].token_ids == [byte_level_tokenizer.eos_token_id]


def test_a_stop_token_that_has_text(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode("a quick fox")
    pieces = taken(choice(byte_level_tokenizer), events(token_ids, FINISH_STOP))
    assert joined(pieces) == byte_level_tokenizer.decode(token_ids[:-1])


def test_special_tokens_are_shown_when_asked_for(byte_level_tokenizer: Any) -> None:
    token_ids = [*byte_level_tokenizer.encode("fox"), byte_level_tokenizer.eos_token_id]
    pieces = taken(choice(byte_level_tokenizer, skip_special_tokens=False), events(token_ids, FINISH_STOP))
    assert joined(pieces) == "fox<|eos|>"


def test_an_echoed_prompt_comes_first_and_ends_nothing(byte_level_tokenizer: Any) -> None:
    prompt = byte_level_tokenizer.encode("stop, st")
    answer = byte_level_tokenizer.encode("op and stop")
    prompt_logprobs = (None, *map(scored, prompt[1:]))
    given = events(answer)
    first = TokenEvent("r", answer[0], logprobs=scored(answer[0]), prompt_logprobs=prompt_logprobs)
    text = choice(byte_level_tokenizer, ["stop"], echoed_prompt=prompt, after_text=True)
    pieces = taken(text, [first, *given[1:]])
    # Neither the prompt's own "stop", nor the one that begins in it, but the first within the answer.
    assert joined(pieces) == "stop, stop and "
    assert pieces[-1].finish_reason == "stop"
    assert text.completion_tokens == len(answer)
    assert pieces[0].token_ids == [*prompt, answer[0]]
    assert pieces[0].logprobs == [*prompt_logprobs, scored(answer[0])]


def test_an_echoed_prompt_alone(byte_level_tokenizer: Any) -> None:
    prompt = byte_level_tokenizer.encode("a 🦊 fox")
    text = choice(byte_level_tokenizer, echoed_prompt=prompt)
    (piece,) = taken(text, [TokenEvent("r", None, FINISH_LENGTH)])
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("a 🦊 fox", prompt, "length")
    assert piece.logprobs == [None] * len(prompt)
    assert text.completion_tokens == 0


def test_a_character_that_begins_in_the_prompt_and_ends_in_the_answer(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode("x🦊")
    text = choice(byte_level_tokenizer, echoed_prompt=token_ids[:-1])
    (piece,) = taken(text, events(token_ids[-1:]))
    assert piece.text == "x🦊"


def test_offsets_say_how_much_text_was_there_before_each_token(byte_level_tokenizer: Any) -> None:
    token_ids = byte_level_tokenizer.encode(TEXT)
    pieces = taken(choice(byte_level_tokenizer, echoed_prompt=token_ids[:4]), events(token_ids[4:]))
    got = [offset for piece in pieces for offset in piece.text_offsets]
    whole = [byte_level_tokenizer.decode(token_ids[:count]).rstrip("\ufffd") for count in range(len(token_ids))]
    assert got == list(map(len, whole))


def test_an_answer_keeps_the_space_between_it_and_its_prompt(metaspace_tokenizer: Any) -> None:
    token_ids = metaspace_tokenizer.encode("lazy dog", add_special_tokens=False)
    assert metaspace_tokenizer.decode(token_ids) == "lazy dog"
    assert joined(taken(choice(metaspace_tokenizer, after_text=True), events(token_ids))) == " lazy dog"
    assert joined(taken(choice(metaspace_tokenizer), events(token_ids))) == "lazy dog"
