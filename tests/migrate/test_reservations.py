from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from migrate.load import WorkerLoad
from migrate.reservations import Reservations
from migrate.view import WorkerView

TTL_S = 10.0
WORKERS = ["a", "b", "c"]


def load(worker_id: str) -> WorkerLoad:
    return WorkerLoad(
        worker_id=worker_id,
        epoch=1,
        role="monolithic",
        total_blocks=100,
        live_blocks=5,
        running_requests=1,
        waiting_requests=0,
        pending_prefill_tokens=50,
        prefill_tokens_per_s=1000.0,
        steps=0,
    )


def test_a_request_is_counted_on_both_sides_and_each_half_ends_by_itself() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("r", now_s=0, prefill_worker="a", prefill_tokens=30, decode_worker="b", decode_blocks=4)
    assert reservations.view(load("a")) == WorkerView(load("a"), 30, 1, 0, 0)
    assert reservations.view(load("b")) == WorkerView(load("b"), 0, 0, 4, 1)
    assert reservations.release_prefill("r")
    assert reservations.view(load("a")) == WorkerView(load("a"))
    assert reservations.view(load("b")).reserved_decode_blocks == 4
    assert "r" in reservations
    assert reservations.release_decode("r")
    assert "r" not in reservations


def test_one_worker_can_be_both_sides() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("r", now_s=0, prefill_worker="a", prefill_tokens=30, decode_worker="a", decode_blocks=4)
    assert reservations.view(load("a")) == WorkerView(load("a"), 30, 1, 4, 1)
    assert reservations.release("r")
    assert reservations.view(load("a")) == WorkerView(load("a"))


def test_releasing_twice_or_something_unknown_is_harmless() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("r", now_s=0, prefill_worker="a", prefill_tokens=30, decode_worker="b", decode_blocks=4)
    reservations.reserve("other", now_s=0, prefill_worker="a", prefill_tokens=7)
    assert reservations.release("r")
    assert not reservations.release("r")
    assert not reservations.release_prefill("r")
    assert not reservations.release_decode("r")
    assert not reservations.release("never reserved")
    assert reservations.view(load("a")) == WorkerView(load("a"), 7, 1, 0, 0)


def test_expiry_is_by_age_and_at_the_deadline() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("old", now_s=0, prefill_worker="a", prefill_tokens=1)
    reservations.reserve("young", now_s=4, prefill_worker="a", prefill_tokens=2)
    assert reservations.expire(9.9) == []
    assert reservations.expire(10.0) == ["old"]
    assert reservations.view(load("a")).reserved_prefill_tokens == 2
    assert reservations.expire(100.0) == ["young"]
    assert len(reservations) == 0


def test_a_clock_that_steps_back_delays_expiry_and_hides_nothing() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("before", now_s=100, prefill_worker="a", prefill_tokens=1)
    reservations.reserve("after", now_s=50, prefill_worker="a", prefill_tokens=2)
    assert reservations.expire(109.0) == []
    assert reservations.expire(110.0) == ["before", "after"]


def test_a_worker_that_is_gone_takes_its_halves_along() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("r", now_s=0, prefill_worker="a", prefill_tokens=30, decode_worker="b", decode_blocks=4)
    reservations.reserve("s", now_s=0, prefill_worker="c", prefill_tokens=9, decode_worker="a", decode_blocks=2)
    reservations.reserve("t", now_s=0, prefill_worker="c", prefill_tokens=9)
    assert sorted(reservations.worker_gone("a")) == ["r", "s"]
    assert reservations.view(load("a")) == WorkerView(load("a"))
    assert reservations.view(load("b")).reserved_decode_blocks == 4
    assert reservations.view(load("c")).reserved_prefill_tokens == 18
    assert reservations.worker_gone("a") == []


def test_a_request_can_be_reserved_again_once_it_was_released() -> None:
    reservations = Reservations(TTL_S)
    reservations.reserve("r", now_s=0, prefill_worker="a", prefill_tokens=30)
    with pytest.raises(ValueError, match="'r' already holds"):
        reservations.reserve("r", now_s=0, prefill_worker="b", prefill_tokens=30)
    assert reservations.view(load("b")) == WorkerView(load("b"))
    reservations.release("r")
    reservations.reserve("r", now_s=0, prefill_worker="b", prefill_tokens=30)
    assert reservations.view(load("b")).reserved_prefill_tokens == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefill_worker": "a", "prefill_tokens": -1}, "prefill_tokens is -1"),
        ({"decode_worker": "a", "decode_blocks": -1}, "decode_blocks is -1"),
        ({"prefill_worker": "a", "decode_blocks": 1}, "decode_blocks is 1 for worker None"),
        ({}, "reserves on no worker"),
    ],
)
def test_impossible_reservations_are_refused(arguments: dict[str, object], message: str) -> None:
    reservations = Reservations(TTL_S)
    with pytest.raises(ValueError, match=message):
        reservations.reserve("r", now_s=0, **arguments)  # type: ignore[arg-type]
    assert "r" not in reservations


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_to_live_are_refused(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        Reservations(ttl_s)


def test_nothing_is_kept_of_workers_that_came_and_went() -> None:
    reservations = Reservations(TTL_S)
    sizes = []
    for i in range(100):
        reservations.reserve("r", now_s=0, prefill_worker=f"p{i}", prefill_tokens=1, decode_worker=f"d{i}")
        reservations.worker_gone(f"p{i}")
        reservations.release("r")
        sizes.append(len(pickle.dumps(reservations)))
    assert len(set(sizes)) == 1


@dataclass
class Expected:
    prefill: tuple[str, int] | None
    decode: tuple[str, int] | None
    deadline_s: float


class ReservationsMachine(RuleBasedStateMachine):
    """Against a plain list of what is held, summed anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations(TTL_S)
        self.expected: dict[str, Expected] = {}
        self.now_s = 0.0
        self.count = 0

    def forget_empty(self) -> None:
        self.expected = {i: e for i, e in self.expected.items() if e.prefill is not None or e.decode is not None}

    def some_id(self, data: st.DataObject) -> str:
        """One that is held, was held, or never existed."""
        return f"r{data.draw(st.integers(0, self.count))}"

    @rule(
        prefill=st.one_of(st.none(), st.tuples(st.sampled_from(WORKERS), st.integers(0, 1000))),
        decode=st.tuples(st.sampled_from(WORKERS), st.integers(0, 50)),
    )
    def reserve(self, prefill: tuple[str, int] | None, decode: tuple[str, int]) -> None:
        request_id = f"r{self.count}"
        self.count += 1
        self.reservations.reserve(
            request_id,
            now_s=self.now_s,
            prefill_worker=prefill[0] if prefill else None,
            prefill_tokens=prefill[1] if prefill else 0,
            decode_worker=decode[0],
            decode_blocks=decode[1],
        )
        self.expected[request_id] = Expected(prefill, decode, self.now_s + TTL_S)

    @rule(data=st.data())
    def release_prefill(self, data: st.DataObject) -> None:
        request_id = self.some_id(data)
        held = self.expected.get(request_id)
        assert self.reservations.release_prefill(request_id) == (held is not None and held.prefill is not None)
        if held is not None:
            held.prefill = None
        self.forget_empty()

    @rule(data=st.data())
    def release_decode(self, data: st.DataObject) -> None:
        request_id = self.some_id(data)
        held = self.expected.get(request_id)
        assert self.reservations.release_decode(request_id) == (held is not None and held.decode is not None)
        if held is not None:
            held.decode = None
        self.forget_empty()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request_id = self.some_id(data)
        assert self.reservations.release(request_id) == (self.expected.pop(request_id, None) is not None)

    @precondition(lambda self: self.count > 0)
    @rule(seconds=st.floats(0, 6))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        over = [i for i, e in self.expected.items() if e.deadline_s <= self.now_s]
        assert self.reservations.expire(self.now_s) == over
        for request_id in over:
            del self.expected[request_id]

    @rule(worker=st.sampled_from(WORKERS))
    def worker_gone(self, worker: str) -> None:
        touched = {
            i
            for i, e in self.expected.items()
            if (e.prefill is not None and e.prefill[0] == worker) or (e.decode is not None and e.decode[0] == worker)
        }
        gone = self.reservations.worker_gone(worker)
        assert len(gone) == len(set(gone))
        assert set(gone) == touched
        for held in self.expected.values():
            held.prefill = None if held.prefill is not None and held.prefill[0] == worker else held.prefill
            held.decode = None if held.decode is not None and held.decode[0] == worker else held.decode
        self.forget_empty()

    @invariant()
    def sums_are_those_of_what_is_held(self) -> None:
        assert len(self.reservations) == len(self.expected)
        for worker in WORKERS:
            prefill = [e.prefill[1] for e in self.expected.values() if e.prefill is not None and e.prefill[0] == worker]
            decode = [e.decode[1] for e in self.expected.values() if e.decode is not None and e.decode[0] == worker]
            expected = WorkerView(load(worker), sum(prefill), len(prefill), sum(decode), len(decode))
            assert self.reservations.view(load(worker)) == expected


TestReservationsMachine = ReservationsMachine.TestCase
