from __future__ import annotations

import asyncio

import pytest

from load_tests.arrivals import at_times, closed_loop
from load_tests.driver import clock_s, drive
from load_tests.request_record import RequestRecord


def test_a_closed_loop_keeps_exactly_so_many_in_flight() -> None:
    in_flight: set[int] = set()
    sizes: list[int] = []

    async def send(index: int, scheduled_s: float) -> RequestRecord:
        in_flight.add(index)
        sizes.append(len(in_flight))
        for _ in range(index % 3 + 1):  # Some take longer than others.
            await asyncio.sleep(0)
        in_flight.remove(index)
        return RequestRecord(scheduled_s, wanted_output_tokens=index)

    records = asyncio.run(drive(closed_loop(20, in_flight=4), send))
    assert max(sizes) == 4
    assert [record.wanted_output_tokens for record in records] == list(range(20))


def test_an_open_loop_waits_for_no_answer() -> None:
    async def run() -> list[RequestRecord]:
        started = 0
        all_started = asyncio.Event()

        async def send(index: int, scheduled_s: float) -> RequestRecord:
            nonlocal started
            started += 1
            if started == 30:
                all_started.set()
            await all_started.wait()  # No request ends before the last one was sent.
            return RequestRecord(scheduled_s, wanted_output_tokens=index)

        return await asyncio.wait_for(drive(at_times([0.001 * i for i in range(30)]), send), timeout=60)

    records = asyncio.run(run())
    assert [record.wanted_output_tokens for record in records] == list(range(30))


def test_open_loop_times_are_the_plans_and_nothing_is_sent_early() -> None:
    due_s = [0.0, 0.01, 0.01, 0.03]
    sent_s: list[float] = []

    async def send(index: int, scheduled_s: float) -> RequestRecord:
        sent_s.append(clock_s())
        return RequestRecord(scheduled_s, wanted_output_tokens=1)

    records = asyncio.run(drive(at_times(due_s), send))
    for record, due, sent in zip(records, due_s, sent_s, strict=True):
        assert record.scheduled_s - records[0].scheduled_s == pytest.approx(due)
        assert sent >= record.scheduled_s - 1e-3  # asyncio's own clock may wake a sleeper a tick early


def test_in_a_closed_loop_a_requests_turn_comes_when_a_place_is_free() -> None:
    ended_s: list[float] = []

    async def send(index: int, scheduled_s: float) -> RequestRecord:
        await asyncio.sleep(0.001)
        ended_s.append(clock_s())
        return RequestRecord(scheduled_s, wanted_output_tokens=1)

    records = asyncio.run(drive(closed_loop(3, in_flight=1), send))
    for record, previous_end_s in zip(records[1:], ended_s, strict=False):
        assert record.scheduled_s >= previous_end_s


def test_an_empty_plan_gives_no_records() -> None:
    async def send(index: int, scheduled_s: float) -> RequestRecord:
        raise AssertionError("nothing to send")

    assert asyncio.run(drive(closed_loop(0, in_flight=3), send)) == []
