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


def test_a_copy_that_fails_has_ended_too() -> None:
    gate = CopyGate()
    with pytest.raises(KeyError), gate.copying(LIMIT_S):
        raise KeyError
    assert gate.num_under_way == 0
