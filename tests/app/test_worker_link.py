from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from actors.engine.request import FINISH_ERROR, EngineRequest, SamplingParams, TokenEvent
from actors.messages import HandOver, Submission
from app.worker_link import WorkerLink, WorkerLostError
from tests.plain_worker import PlainWorker, until


def submission(name: str) -> Submission:
    return Submission(EngineRequest(name, (1, 2, 3), SamplingParams(max_tokens=8), owner="whoever"))


async def assert_serves(link: WorkerLink, worker: PlainWorker, asked: Submission, token_id: int) -> None:
    """A request that is submitted now gets the token that the worker gives."""
    queue = await link.submit(asked)
    worker.give(token_id)
    event = await queue.get()
    assert isinstance(event, TokenEvent)
    assert event.token_id == token_id


Body = Callable[[PlainWorker, WorkerLink, list[WorkerLink]], Awaitable[None]]


async def through_ray(_: PlainWorker) -> None:
    return


async def over_a_socket(worker: PlainWorker) -> None:
    await worker.wait_for_lines()


async def where_nobody_waits(worker: PlainWorker) -> None:
    await worker.wait_for_lines()
    worker.lines.close()


async def with_another_key(worker: PlainWorker) -> None:
    await worker.wait_for_lines()
    assert worker.line_address is not None
    worker.line_address = replace(worker.line_address, key=bytes(32))


def run(body: Body, ways: Sequence[Callable[[PlainWorker], Awaitable[None]]] = (through_ray, over_a_socket)) -> None:
    async def limited(prepare: Callable[[PlainWorker], Awaitable[None]]) -> None:
        async with asyncio.timeout(30):
            worker, lost = PlainWorker(), []
            await prepare(worker)
            link = WorkerLink(worker.member(), "ingress", lambda _: None, lost.append)
            try:
                await body(worker, link, lost)
            finally:
                link.stop()
                worker.lines.close()

    for way in ways:
        asyncio.run(limited(way))


def test_events_go_to_the_request_they_are_of() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, _: list[WorkerLink]) -> None:
        queues = [await link.submit(submission(name)) for name in "ab"]
        worker.give(5, number=1)
        worker.give(4, number=0)
        worker.outbox.deliver_hand_over(worker.submitted[0].request.owner, HandOver("a", 3, None))
        for queue, token in zip(queues, (4, 5), strict=True):
            event = await queue.get()
            assert isinstance(event, TokenEvent)
            assert event.token_id == token
        assert isinstance(await queues[0].get(), HandOver)

    run(body)


def test_a_worker_to_which_there_is_no_line_is_asked_through_ray() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        await assert_serves(link, worker, submission("a"), token_id=5)
        assert lost == []

    run(body, [where_nobody_waits, with_another_key])


def test_a_line_that_breaks_is_a_lost_worker_though_it_may_live() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        queue = await link.submit(submission("a"))
        await until(lambda: link.load is not None)  # news that were under way may be lost with it
        worker.lines.close()
        assert isinstance(await queue.get(), WorkerLostError)
        assert lost == [link]
        again = WorkerLink(worker.member(), "ingress", lambda _: None, lambda _: None)
        await assert_serves(again, worker, submission("a"), token_id=6)
        again.stop()

    run(body, [over_a_socket])


def test_news_of_a_request_that_is_closed_or_aborted_is_dropped() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, _: list[WorkerLink]) -> None:
        queues = [await link.submit(submission(name)) for name in "abc"]
        link.close("a")
        link.abort("b")
        for number in range(3):
            worker.give(number, number=number)
        event = await queues[2].get()
        assert isinstance(event, TokenEvent)
        assert event.token_id == 2
        assert queues[0].empty()
        assert queues[1].empty()
        assert link.num_open == 1
        assert worker.aborted == ["b"]

    run(body)


def test_a_submit_that_is_cancelled_half_way_is_aborted_on_the_worker() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, _: list[WorkerLink]) -> None:
        worker.answers_submit.clear()
        task = asyncio.create_task(link.submit(submission("a")))
        await until(lambda: bool(worker.submitted))
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: worker.aborted == ["a"])
        assert link.num_open == 0

    run(body)


def test_a_dead_worker_fails_all_its_requests_and_is_reported_once() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        queues = [await link.submit(submission(name)) for name in "ab"]
        worker.give(7, number=0)
        event = await queues[0].get()
        assert isinstance(event, TokenEvent)
        worker.die(ActorDiedError())
        for queue in queues:
            assert isinstance(await queue.get(), WorkerLostError)
        assert lost == [link]
        with pytest.raises(WorkerLostError):
            await link.submit(submission("c"))
        assert lost == [link]
        assert link.num_open == 0

    run(body)


def test_a_worker_that_is_dead_when_the_request_is_sent_is_lost() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        worker.fails_submit = ActorDiedError()
        with pytest.raises(WorkerLostError):
            await link.submit(submission("a"))
        assert lost == [link]

    run(body)


def test_a_request_that_the_worker_cannot_take_ends_alone() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        well = await link.submit(submission("a"))
        cause = TypeError("no such field")
        worker.fails_submit = RayTaskError("submit", "traceback", cause).as_instanceof_cause()
        event = await (await link.submit(submission("b"))).get()
        assert isinstance(event, TokenEvent)
        assert event.finish_reason == FINISH_ERROR
        assert "no such field" in (event.error or "")
        assert lost == []
        worker.give(1, number=0)
        event = await well.get()
        assert isinstance(event, TokenEvent)
        assert event.token_id == 1

    run(body)


def test_a_line_that_was_stopped_sends_nothing_but_aborts() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        queue = await link.submit(submission("a"))
        link.stop()
        assert isinstance(await queue.get(), WorkerLostError)
        with pytest.raises(WorkerLostError):  # else it would wait for tokens that nobody collects
            await link.submit(submission("b"))
        link.abort("a")
        await until(lambda: worker.aborted == ["a"])
        assert [sent.request.request_id for sent in worker.submitted] == ["a"]
        assert lost == []

    run(body)


def test_requests_that_the_worker_freed_are_given_back_to_be_sent_again() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, lost: list[WorkerLink]) -> None:
        freed = await link.submit(submission("a"))
        worker.give(1)
        event = await freed.get()
        assert isinstance(event, TokenEvent)
        # The open call is answered, and before the next one comes the worker loses its patience.
        worker.outbox.nudge()
        assert len(worker.outbox.lost_owners(periods=-1)) == 1
        assert isinstance(await freed.get(), WorkerLostError)
        assert lost == []  # the worker is well
        await assert_serves(link, worker, submission("b"), token_id=2)

    run(body)


def test_two_lines_of_one_ingress_to_one_worker_do_not_take_each_others_news() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, _: list[WorkerLink]) -> None:
        await until(lambda: link.load is not None)
        link.stop()  # its call stays open on the worker
        again = WorkerLink(worker.member(), "ingress", lambda _: None, lambda _: None)
        await assert_serves(again, worker, submission("a"), token_id=3)
        again.stop()

    run(body)


def test_a_step_that_hangs_after_a_report_of_idleness_counts_as_no_progress() -> None:
    async def body(worker: PlainWorker, link: WorkerLink, _: list[WorkerLink]) -> None:
        loop = asyncio.get_running_loop()
        await until(lambda: link.load is not None)
        await link.submit(submission("a"))
        sent_s = loop.time()
        worker.outbox.nudge()
        before = link.load
        await until(lambda: link.load is not before)
        assert link.load is not None
        assert link.load.running_requests + link.load.waiting_requests == 0
        reported_s = loop.time()
        assert link.progress.stalled_s(reported_s) >= reported_s - sent_s
        worker.steps += 1
        worker.outbox.nudge()
        before = link.load
        await until(lambda: link.load is not before)
        assert link.progress.stalled_s(loop.time()) <= loop.time() - reported_s

    run(body)
