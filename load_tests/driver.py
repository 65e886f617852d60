"""Carries out an arrival plan: calls a coroutine per request at its time, at most so many at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from load_tests.arrivals import ArrivalPlan
from load_tests.request_record import RequestRecord

clock_s = time.perf_counter
"""The load generator's one clock."""


async def drive(plan: ArrivalPlan, send: Callable[[int, float], Awaitable[RequestRecord]]) -> list[RequestRecord]:
    """Calls `send(index, scheduled_s)` for each request of `plan`; returns the records in the plan's order.

    `scheduled_s` is on `clock_s`. In a closed loop a request's turn comes when a place is free and its due time has
    passed. `send` must report a failed request in its record; an exception that it raises stops the run.
    """
    start_s = clock_s()
    records: dict[int, RequestRecord] = {}

    async def send_one(index: int, scheduled_s: float) -> None:
        records[index] = await send(index, scheduled_s)

    async def wait_until(moment_s: float) -> None:
        await asyncio.sleep(max(0.0, moment_s - clock_s()))

    turns = enumerate(plan.due_s)

    async def keep_one_in_flight() -> None:
        for index, due_s in turns:
            turn_s = clock_s()
            await wait_until(start_s + due_s)
            await send_one(index, max(turn_s, start_s + due_s))

    async with asyncio.TaskGroup() as group:
        if plan.max_in_flight is None:
            for index, due_s in turns:
                await wait_until(start_s + due_s)
                group.create_task(send_one(index, start_s + due_s))
        else:
            for _ in range(min(plan.max_in_flight, len(plan.due_s))):
                group.create_task(keep_one_in_flight())
    return [records[index] for index in range(len(plan.due_s))]
