"""Admission in one event loop: who waits, who is let in, and what a client that goes away leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from actors.addresses import WorkerAddress
from actors.messages import WorkerFacts, WorkerMessage
from app.dispatcher import Dispatcher
from kv.layout import KvLayout
from migrate.admission import AdmissionPolicy
from migrate.dispatch import make_policy
from migrate.load import WorkerLoad
from migrate.roster import Member
from migrate.view import DispatchRequest


class _Method:
    """A method as an actor's handle has it."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.remote = function


class IdleWorker:
    """In the place of a worker's handle: reports that it is idle, once, and is silent from then on."""

    def __init__(self) -> None:
        self._reported = False
        self.collect = _Method(self._collect)

    async def _collect(self, _owner: str, _timeout_s: float) -> WorkerMessage:
        if self._reported:
            await asyncio.Event().wait()
        self._reported = True
        load = WorkerLoad(
            worker_id="w",
            epoch=0,
            role="monolithic",
            total_blocks=100,
            live_blocks=0,
            running_requests=0,
            waiting_requests=0,
            pending_prefill_tokens=0,
            prefill_tokens_per_s=100.0,
            steps=0,
        )
        return WorkerMessage(load=load)


def one_idle_worker() -> Member:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
    facts = WorkerFacts(layout, b"", 1600, 100, 260, (), "torch", "cpu")
    return Member("w", 0, "monolithic", "node", b"", 16, 100, 1600, WorkerAddress(IdleWorker(), facts))


def request(name: str) -> DispatchRequest:
    return DispatchRequest(name, uncached_tokens=16, prompt_tokens=16, num_blocks=1)


def test_a_client_that_leaves_the_queue_just_as_its_turn_comes_harms_nobody() -> None:
    async def run() -> None:
        dispatcher = Dispatcher(
            "i", "monolithic", make_policy("load_aware"), AdmissionPolicy(1, 10), 600.0, on_suspect=lambda _: None
        )
        dispatcher.update_members((one_idle_worker(),))
        async with asyncio.timeout(30):
            await dispatcher.admit(request("running"))
            leaving, next_one = (asyncio.create_task(dispatcher.admit(request(name))) for name in ("leaving", "next"))
            while dispatcher.num_waiting < 2:
                await asyncio.sleep(0)
            # Both before the loop turns: the one that leaves is still in the queue when room is made.
            leaving.cancel()
            dispatcher.release("running")
            assert (await next_one).request_id == "next"
        assert leaving.cancelled()
        assert (dispatcher.num_inflight, dispatcher.num_waiting) == (1, 0)
        dispatcher.release("next")
        assert dispatcher.num_inflight == 0
        dispatcher.stop()

    asyncio.run(run())
