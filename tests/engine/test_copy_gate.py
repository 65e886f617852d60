"""Copies by other threads, and times at which there are none."""

from __future__ import annotations

import threading

import pytest

from actors.engine.copy_gate import CopyGate, GateClosedError

LIMIT_S = 60.0


def test_who_closes_it_hears_when_the_last_copy_has_ended() -> None:
    gate, told = CopyGate(), list[int]()
    with gate.copying(LIMIT_S):
        with gate.copying(LIMIT_S):
            gate.close()
            gate.when_idle(lambda: told.append(gate.num_under_way))
            assert gate.num_under_way == 2
        assert told == []
    assert told == [0]
    gate.when_idle(lambda: told.append(1))
    assert told == [0, 1]


def test_copies_wait_until_it_is_opened() -> None:
    gate, begun = CopyGate(), threading.Event()
    gate.close()
    with pytest.raises(GateClosedError), gate.copying(0.0):
        begun.set()

    def copy() -> None:
        with gate.copying(LIMIT_S):
            begun.set()

    thread = threading.Thread(target=copy)
    thread.start()
    assert not begun.is_set()
    gate.open()
    thread.join(LIMIT_S)
    assert begun.is_set()


def test_copies_that_wait_may_be_refused_until_it_is_opened() -> None:
    gate, refused = CopyGate(), list[str]()
    gate.refuse()  # an open one lets copies in
    with gate.copying(0.0):
        gate.close()

    def copy() -> None:
        try:
            with gate.copying(LIMIT_S):
                pass
        except GateClosedError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=copy) for _ in range(2)]
    threads[0].start()
    gate.refuse()
    threads[1].start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert refused == ["all KV is being computed anew"] * 2
    gate.open()
    with gate.copying(0.0):
        assert gate.num_under_way == 1
    gate.close()
    with pytest.raises(GateClosedError, match=r"longer than 0\.0 s"), gate.copying(0.0):
        pass


def test_a_copy_that_fails_has_ended_too() -> None:
    gate = CopyGate()
    with pytest.raises(KeyError), gate.copying(LIMIT_S):
        raise KeyError
    assert gate.num_under_way == 0
