from __future__ import annotations

from load_tests.gaps_around import gaps_around, gaps_of, longest_silence_s
from load_tests.request_record import RequestRecord


def record(sent_s: float, chunk_s: list[float], ended_s: float) -> RequestRecord:
    return RequestRecord(sent_s, len(chunk_s), sent_s=sent_s, chunk_s=chunk_s, ended_s=ended_s)


def test_gaps_before_during_and_after_a_move() -> None:
    gaps = gaps_of([record(0, [1.0, 2.0, 4.0, 7.0, 7.5, 9.5], 10), record(0, [6.5], 7), record(0, [5.2, 5.4], 6)])
    around = gaps_around(gaps, begun_s=5.0, ended_s=6.0, window_s=3.0)
    assert around.before_s == [2.0]  # that from 1 to 2 begins earlier than 3 s before
    assert around.during_s == [3.0, 5.4 - 5.2]  # from 4 to 7: it was held up by the move
    assert around.after_s == [0.5]  # that from 7.5 to 9.5 ends later than 3 s after


def test_a_gap_that_touches_a_move_is_not_during() -> None:
    around = gaps_around([(1.0, 2.0), (3.0, 4.0)], begun_s=2.0, ended_s=3.0, window_s=1.0)
    assert (around.before_s, around.during_s, around.after_s) == ([1.0], [], [1.0])


def test_silence_is_only_while_somebody_waits() -> None:
    busy = [record(0.0, [1.0, 2.0], 2.0), record(1.0, [1.5, 5.0], 5.5)]
    assert longest_silence_s(busy) == 3.0  # 2 to 5, the second one is under way
    assert longest_silence_s([*busy, record(50.0, [50.5], 50.5)]) == 3.0  # 5.5 to 50: nobody is
    assert longest_silence_s([record(0.0, [], 9.0)]) == 9.0
    assert longest_silence_s([]) == 0.0
