from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from actors.engine.request import TokenEvent
from actors.messages import HandOver
from actors.outbox import Outbox

T = TypeVar("T")
LONG_S = 1000.0


def run(body: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(30):
            return await body

    return asyncio.run(limited())


def event(owner: str, token: int) -> TokenEvent:
    return TokenEvent("r", token, owner=owner)


def test_each_owner_gets_its_own_news_in_order_and_once() -> None:
    async def body() -> None:
        outbox = Outbox()
        outbox.deliver([event("a", 1), event("b", 2), event("a", 3)])
        outbox.deliver_hand_over("a", HandOver("r", 5, None))
        outbox.deliver([event("a", 4)])
        message = await outbox.collect("a", LONG_S)
        assert [e.token_id for e in message.events] == [1, 3, 4]
        assert [h.num_tokens for h in message.hand_overs] == [5]
        assert [e.token_id for e in (await outbox.collect("b", LONG_S)).events] == [2]
        assert not (await outbox.collect("a", 0.0)).events

    run(body())


def test_the_first_call_is_answered_at_once() -> None:
    async def body() -> None:
        message = await Outbox().collect("a", LONG_S)
        assert not message.events

    run(body())


def test_news_and_a_nudge_wake_a_waiting_call() -> None:
    async def body() -> None:
        outbox = Outbox()
        await outbox.collect("a", LONG_S)
        waiting = asyncio.create_task(outbox.collect("a", LONG_S))
        await asyncio.sleep(0)
        outbox.deliver([event("a", 1)])
        assert [e.token_id for e in (await waiting).events] == [1]
        waiting = asyncio.create_task(outbox.collect("a", LONG_S))
        await asyncio.sleep(0)
        outbox.nudge()
        assert not (await waiting).events

    run(body())


def test_a_call_that_is_cancelled_loses_nothing() -> None:
    async def body() -> None:
        outbox = Outbox()
        await outbox.collect("a", LONG_S)
        waiting = asyncio.create_task(outbox.collect("a", LONG_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        outbox.deliver([event("a", 1)])
        assert [e.token_id for e in (await outbox.collect("a", LONG_S)).events] == [1]

    run(body())


def test_owners_are_lost_after_so_many_periods_of_silence() -> None:
    async def body() -> None:
        outbox = Outbox()
        outbox.expect("sent a request and died")
        outbox.deliver([event("never asked", 1)])
        await outbox.collect("asked once", 0.0)
        for _ in range(3):
            assert outbox.lost_owners(3) == []
        assert sorted(outbox.lost_owners(3)) == ["asked once", "never asked", "sent a request and died"]
        assert outbox.lost_owners(3) == []

    run(body())


def test_an_owner_with_an_open_call_is_not_silent() -> None:
    async def body() -> None:
        outbox = Outbox()
        await outbox.collect("a", LONG_S)
        waiting = asyncio.create_task(outbox.collect("a", LONG_S))
        await asyncio.sleep(0)
        for _ in range(10):
            assert outbox.lost_owners(3) == []
        outbox.nudge()
        await waiting
        for _ in range(3):
            assert outbox.lost_owners(3) == []
        assert outbox.lost_owners(3) == ["a"]

    run(body())


def test_an_owner_that_was_taken_for_dead_comes_back_in_another_session() -> None:
    async def body() -> None:
        outbox = Outbox()
        sessions = [(await outbox.collect("a", 0.0)).session for _ in range(2)]
        assert sessions[0] == sessions[1]
        outbox.deliver([event("a", 1)])
        while not outbox.lost_owners(3):
            pass
        outbox.deliver([event("a", 2)])
        message = await outbox.collect("a", 0.0)
        assert message.session != sessions[0]
        assert [e.token_id for e in message.events] == [2]

    run(body())
