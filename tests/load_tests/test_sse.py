from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.sse import EventStreamDecoder, ServerSentEvent


def decode(*pieces: bytes) -> list[ServerSentEvent]:
    decoder = EventStreamDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


# The examples of the HTML standard, section 9.2.6.
STANDARD = [
    (b"data: YHOO\ndata: +2\ndata: 10\n\n", [("message", "YHOO\n+2\n10")]),
    (
        b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n",
        [("message", "first event"), ("message", "second event"), ("message", " third event")],
    ),
    (b"data\n\ndata\ndata\n\ndata:", [("message", ""), ("message", "\n")]),
    (b"data:test\n\ndata: test\n\n", [("message", "test"), ("message", "test")]),
    (b"event: add\ndata: 73857293\n\nevent: remove\ndata: 2153\n\n", [("add", "73857293"), ("remove", "2153")]),
]
OTHERS = [
    (b"data: a\r\ndata: b\r\n\r\ndata: c\r\rdata: d\n\n", [("message", "a\nb"), ("message", "c"), ("message", "d")]),
    (b"\xef\xbb\xbfdata: a\n\n", [("message", "a")]),
    (b"event: lost\n\ndata: a\n\n", [("message", "a")]),
    ("data: gr\u00fc\u00df\u20ac\n\n".encode(), [("message", "gr\u00fc\u00df\u20ac")]),
    (b"data: \xff\n\n", [("message", "\ufffd")]),
    (b"retry: 10\nunknown: x\n\n", []),
]


@pytest.mark.parametrize(("stream", "events"), STANDARD + OTHERS)
def test_streams_decode_as_the_standard_says(stream: bytes, events: list[tuple[str, str]]) -> None:
    assert decode(stream) == [ServerSentEvent(*event) for event in events]


@given(
    case=st.sampled_from(STANDARD + OTHERS),
    cuts=st.lists(st.integers(0, 120), max_size=8),
)
def test_where_the_stream_is_cut_changes_nothing(case: tuple[bytes, list[tuple[str, str]]], cuts: list[int]) -> None:
    stream, events = case
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert decode(*pieces) == [ServerSentEvent(*event) for event in events]


def test_an_event_is_given_out_as_soon_as_its_empty_line_is_there() -> None:
    decoder = EventStreamDecoder()
    assert decoder.feed(b"data: a\r") == []
    assert decoder.feed(b"\r") == [ServerSentEvent("message", "a")]
    assert decoder.feed(b"\ndata: b\n\n") == [ServerSentEvent("message", "b")]


@pytest.mark.parametrize("end", [b"data: a", b"data: a\n", b"data: a\r", b"data: a\r\n"])
def test_a_last_event_without_its_empty_line_is_not_lost(end: bytes) -> None:
    decoder = EventStreamDecoder()
    assert decoder.feed(end) == []
    assert decoder.finish() == [ServerSentEvent("message", "a")]
    assert decoder.finish() == []
