from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.stop_strings import StopMatcher

stop_lists = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)
chopped = st.lists(st.text("abc", max_size=4), max_size=12)
thorough = settings(max_examples=500, deadline=None)


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(map(len, complete))
            return text[: end if include else end - longest], True
    return text, False


def to_hold(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    return max(
        (length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])),
        default=0,
    )


@thorough
@given(chopped, stop_lists, st.booleans())
def test_any_chopping_gives_what_the_whole_text_gives(texts: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_in_output=include)
    emitted = "".join(matcher.push(text)[0] for text in texts)
    if not matcher.stopped:
        emitted += matcher.flush()
    assert (emitted, matcher.stopped) == brute_force("".join(texts), stops, include)
    assert matcher.flush() == ""


@thorough
@given(chopped, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop_string(texts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = emitted = ""
    for text in texts:
        seen += text
        emitted += matcher.push(text)[0]
        if matcher.stopped:
            break
        assert emitted == seen[: len(seen) - to_hold(seen, stops)]


@thorough
@given(chopped, stop_lists)
def test_nothing_is_held_back_when_the_stop_string_is_part_of_the_answer(texts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_in_output=True)
    for text in texts:
        emitted, stopped = matcher.push(text)
        if stopped:
            break
        assert emitted == text


def test_a_stop_string_over_several_tokens() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(text) for text in ("the ", "E", "N", "D")] == [
        ("the ", False),
        ("", False),
        ("", False),
        ("", True),
    ]


def test_a_false_start_is_sent_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("EN") == ("", False)
    assert matcher.push("X") == ("ENX", False)


def test_a_false_start_may_hold_the_true_one() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", False)
    assert matcher.push("a") == ("a", False)
    assert matcher.push("b") == ("", True)


@pytest.mark.parametrize(
    ("stops", "text", "sent"),
    [
        (["world", "o"], "hello world", "hell"),  # the one that is complete first, whatever the list's order
        (["o", "world"], "hello world", "hell"),
        (["lo", "hello"], "say hello", "say "),  # complete at the same character: the longest
        (["abcd", "bc"], "abcd", "a"),  # "bc" is complete before "abcd"
        (["\n\n"], "one\n\ntwo", "one"),
        (["。"], "你好。世界", "你好"),
    ],
)
def test_which_one_wins(stops: list[str], text: str, sent: str) -> None:
    assert StopMatcher(stops).push(text) == (sent, True)


def test_text_after_the_stop_string_is_swallowed() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c.d") == ("", True)
    assert matcher.flush() == ""


def test_what_is_held_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("x <en") == ("x ", False)
    assert matcher.flush() == "<en"
    assert matcher.flush() == ""


def test_no_stop_strings() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
