from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kv.metrics.growth import Growth
from kv.metrics.table import DECLINED, LOOKUPS, Series

PREFILL: Series = (LOOKUPS, ("prefill",))
DECODE: Series = (LOOKUPS, ("decode",))
OTHER: Series = (DECLINED, ("prefill",))


def test_a_total_counts_once() -> None:
    growth = Growth()
    assert growth.since_last({PREFILL: 3}) == {PREFILL: 3}
    assert growth.since_last({PREFILL: 3}) == {}
    assert growth.since_last({PREFILL: 10}) == {PREFILL: 7}


def test_nothing_yet_is_nothing_to_report() -> None:
    assert Growth().since_last({PREFILL: 0, DECODE: 2}) == {DECODE: 2}


def test_series_are_told_apart_by_name_and_tags() -> None:
    growth = Growth()
    growth.since_last({PREFILL: 5, DECODE: 7, OTHER: 11})
    assert growth.since_last({PREFILL: 6, DECODE: 7, OTHER: 13}) == {PREFILL: 1, OTHER: 2}


def test_what_begins_anew_counts_from_zero() -> None:
    growth = Growth()
    growth.since_last({PREFILL: 100, DECODE: 4})
    assert growth.since_last({PREFILL: 8, DECODE: 5}) == {PREFILL: 8, DECODE: 1}
    assert growth.since_last({PREFILL: 0}) == {}
    assert growth.since_last({PREFILL: 2}) == {PREFILL: 2}


def test_what_is_not_there_for_a_while_goes_on_where_it_was() -> None:
    growth = Growth()
    growth.since_last({PREFILL: 5, DECODE: 1})
    assert growth.since_last({DECODE: 2}) == {DECODE: 1}
    assert growth.since_last({PREFILL: 9, DECODE: 2}) == {PREFILL: 4}


@given(st.lists(st.lists(st.integers(0, 50))))
def test_all_that_was_ever_counted_is_reported_once(runs: list[list[int]]) -> None:
    """Each run is a process that counts from zero, and shows that it does."""
    growth, reported = Growth(), 0.0
    for increments in runs:
        for total in itertools.accumulate(increments, initial=0):
            reported += growth.since_last({PREFILL: total}).get(PREFILL, 0)
    assert reported == sum(map(sum, runs))
