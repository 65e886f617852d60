from __future__ import annotations

from load_tests.request_record import RequestRecord
from load_tests.short_memory import AT_HOME, HEADS_AWAY, most_at_once, sustained


def record(*chunk_s: float) -> RequestRecord:
    return RequestRecord(0.0, 4, sent_s=0.0, chunk_s=list(chunk_s), ended_s=20.0)


def test_requests_at_once_are_those_between_their_first_and_last_tokens() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([record(), record(1.0, 2.0)]) == 1
    # One ends when the next begins: never both.
    assert most_at_once([record(1.0, 1.5, 2.0), record(2.0, 3.0), record(3.0, 4.0)]) == 1
    assert most_at_once([record(1.0, 9.0), record(2.0, 4.0), record(3.0, 5.0), record(4.5, 6.0)]) == 3


def test_only_runs_in_which_nobody_began_anew_count() -> None:
    rows = [
        {"heads": AT_HOME, "at_once": 2, "preemptions": 0},
        {"heads": AT_HOME, "at_once": 4, "preemptions": 1},
        {"heads": HEADS_AWAY, "at_once": 3, "preemptions": 0},
    ]
    assert (sustained(rows, AT_HOME), sustained(rows, HEADS_AWAY)) == (2, 3)
    assert sustained(rows[1:2], AT_HOME) == 0
