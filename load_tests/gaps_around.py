"""Gaps between tokens before, during and after a move.

Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from load_tests.request_record import RequestRecord

Gap = tuple[float, float]
"""When a chunk of a request arrived, and the next one."""


@dataclass(frozen=True, slots=True)
class GapsAround:
    """Seconds between neighbouring chunks, of all requests together."""

    before_s: list[float]
    during_s: list[float]
    after_s: list[float]


def gaps_of(records: Iterable[RequestRecord]) -> list[Gap]:
    """All of them, of failed requests too: until its failure a request had gaps like others."""
    return [gap for record in records for gap in pairwise(record.chunk_s)]


def gaps_around(gaps: Sequence[Gap], begun_s: float, ended_s: float, window_s: float) -> GapsAround:
    """A gap is *during* when any part of it is, so that a token that came late because of the move counts for it;
    before and after are those that lie wholly within `window_s` of its beginning and its end."""
    around = GapsAround([], [], [])
    for earlier, later in gaps:
        if earlier < ended_s and later > begun_s:
            around.during_s.append(later - earlier)
        elif begun_s - window_s <= earlier and later <= begun_s:
            around.before_s.append(later - earlier)
        elif ended_s <= earlier and later <= ended_s + window_s:
            around.after_s.append(later - earlier)
    return around


def longest_silence_s(records: Iterable[RequestRecord]) -> float:
    """The longest time in which some request was under way and no request got anything."""
    records = list(records)
    news = sorted(moment for record in records for moment in (record.sent_s, *record.chunk_s, record.ended_s))
    spans = sorted((record.sent_s, record.ended_s) for record in records)
    longest, index, busy_until = 0.0, 0, float("-inf")
    for earlier, later in pairwise(news):
        while index < len(spans) and spans[index][0] <= earlier:
            busy_until = max(busy_until, spans[index][1])
            index += 1
        if busy_until > earlier:
            longest = max(longest, later - earlier)
    return longest
