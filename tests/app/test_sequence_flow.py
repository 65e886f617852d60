"""A sequence's way over two workers that do what the test says, and what is left when it is cut short anywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from actors.engine.request import FINISH_ERROR, FINISH_LENGTH, EngineRequest, SamplingParams
from actors.messages import HandOver
from app.dispatcher import Dispatcher
from app.sequence_flow import MAX_ATTEMPTS, GrammarFailedError, RequestFailedError, SequenceFlow, SequencePlan
from app.sequence_times import SequenceTimes
from migrate.admission import AdmissionPolicy
from migrate.dispatch import make_policy
from migrate.roster import Member
from tests.plain_worker import BLOCK_TOKENS, PlainWorker, until

PROMPT = tuple(range(20))


async def no_cached_tokens(_: tuple[bytes, ...]) -> int:
    return 0


class Stage:
    """A dispatcher over plain workers, and one sequence that runs in a task."""

    def __init__(
        self, prefill: int = 1, decode: int = 1, *, max_inflight: int = 8, max_queued: int = 8, **sampling: object
    ) -> None:
        self.prefill = [PlainWorker(f"p{index}", "prefill") for index in range(prefill)]
        self.decode = [PlainWorker(f"d{index}", "decode") for index in range(decode)]
        self.suspects: list[Member] = []
        self.dispatcher = Dispatcher(
            "ingress",
            "static",
            make_policy("load_aware"),
            AdmissionPolicy(max_inflight, max_queued),
            600.0,
            self.suspects.append,
        )
        self.list_members(self.prefill + self.decode)
        params = SamplingParams(max_tokens=8, **sampling)  # type: ignore[arg-type]
        self.request = EngineRequest("r", PROMPT, params)
        self.tokens: list[int | None] = []
        self._may_wait = max_queued > 0
        self.task = asyncio.create_task(self._run())

    def list_members(self, workers: list[PlainWorker]) -> None:
        self.dispatcher.update_members(tuple(worker.member() for worker in workers))

    async def _run(self) -> None:
        if not self._may_wait:
            await until(lambda: not self.dispatcher.missing_roles())
        plan = SequencePlan(BLOCK_TOKENS, (), no_cached_tokens, disaggregated=True)
        async with aclosing(SequenceFlow(self.request, plan, self.dispatcher).events()) as events:
            async for event in events:
                self.tokens.append(event.token_id)

    async def sent(self, workers: list[PlainWorker], count: int = 1) -> PlainWorker:
        """The worker that was sent the latest request, once `count` were sent to these workers in all."""
        await until(lambda: sum(len(worker.submitted) for worker in workers) >= count)
        return max(workers, key=lambda worker: len(worker.submitted))

    async def has(self, *tokens: int) -> None:
        await until(lambda: self.tokens == list(tokens))

    def hand_over(self, worker: PlainWorker) -> HandOver:
        request = worker.submitted[-1].request
        hand_over = HandOver(request.request_id, len(request.prompt_token_ids), None)
        worker.outbox.deliver_hand_over(request.owner, hand_over)
        return hand_over

    async def to_decode(self) -> tuple[PlainWorker, PlainWorker]:
        """Brings the sequence to the point where decode has it."""
        prefill = await self.sent(self.prefill)
        prefill.give(10)
        self.hand_over(prefill)
        return prefill, await self.sent(self.decode)

    def assert_nothing_left(self) -> None:
        assert self.dispatcher.num_inflight == 0
        assert self.dispatcher.num_waiting == 0
        assert [link.num_open for link in self.dispatcher.links] == [0] * len(self.dispatcher.links)
        assert len(self.dispatcher._reservations) == 0


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())


def test_those_that_wait_are_sent_in_their_turns() -> None:
    """The times are those of their requests' arrivals, whenever they come to the dispatcher."""

    async def body() -> None:
        stage = Stage(max_inflight=1)
        _, decode = await stage.to_decode()
        tasks = []
        for name, arrived_s, priority_s in (("b", 2.0, 0.0), ("d", 1.0, 5.0), ("a", 6.0, -5.0), ("c", 3.0, 0.0)):
            request = replace(stage.request, request_id=name, priority_s=priority_s)
            plan = SequencePlan(BLOCK_TOKENS, (), no_cached_tokens, disaggregated=True)
            flow = SequenceFlow(request, plan, stage.dispatcher, times=SequenceTimes(arrived_s))
            tasks.append(asyncio.create_task(read(flow)))
        await until(lambda: stage.dispatcher.num_waiting == 4)
        decode.give(11, FINISH_LENGTH)
        for number in range(2, 6):
            prefill = await stage.sent(stage.prefill, number)
            prefill.give(10, FINISH_LENGTH)
        await asyncio.gather(*tasks)
        assert [submission.request.request_id[0] for submission in stage.prefill[0].submitted] == list("rabcd")
        stage.assert_nothing_left()

    run(body)


async def read(flow: SequenceFlow) -> None:
    async with aclosing(flow.events()) as events:
        async for _ in events:
            pass


def test_tokens_come_once_and_in_order_from_both_workers() -> None:
    async def body() -> None:
        stage = Stage()
        _, decode = await stage.to_decode()
        decode.give(11)
        decode.give(12, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [10, 11, 12]
        assert decode.submitted[0].request.output_token_ids == (10,)
        assert decode.aborted == stage.prefill[0].aborted == []
        stage.assert_nothing_left()

    run(body)


def test_a_request_that_ends_with_its_first_token_goes_to_no_decode_worker() -> None:
    async def body() -> None:
        stage = Stage()
        (await stage.sent(stage.prefill)).give(10, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [10]
        assert stage.decode[0].submitted == []
        stage.assert_nothing_left()

    run(body)


def test_only_the_first_worker_is_asked_about_the_prompt() -> None:
    async def body() -> None:
        stage = Stage(prompt_logprobs=3)
        prefill, decode = await stage.to_decode()
        assert prefill.submitted[0].request.sampling.prompt_logprobs == 3
        assert decode.submitted[0].request.sampling.prompt_logprobs is None
        decode.give(11, FINISH_LENGTH)
        await stage.task

    run(body)


# Cancelled: (how far it is brought, who has to be told)


async def in_prefill(stage: Stage) -> list[PlainWorker]:
    return [await stage.sent(stage.prefill)]


async def before_the_hand_over(stage: Stage) -> list[PlainWorker]:
    prefill = await stage.sent(stage.prefill)
    prefill.give(10)
    await stage.has(10)
    return [prefill]


async def in_the_call_to_decode(stage: Stage) -> list[PlainWorker]:
    stage.decode[0].answers_submit.clear()
    prefill, decode = await stage.to_decode()
    return [prefill, decode]


async def before_decode_has_given_a_token(stage: Stage) -> list[PlainWorker]:
    prefill, decode = await stage.to_decode()
    return [prefill, decode]


async def in_decode(stage: Stage) -> list[PlainWorker]:
    _, decode = await stage.to_decode()
    decode.give(11)
    await stage.has(10, 11)
    return [decode]


@pytest.mark.parametrize(
    "bring",
    [in_prefill, before_the_hand_over, in_the_call_to_decode, before_decode_has_given_a_token, in_decode],
)
def test_a_cancelled_sequence_is_freed_where_it_is(bring: Callable[[Stage], Awaitable[list[PlainWorker]]]) -> None:
    async def body() -> None:
        stage = Stage()
        told = await bring(stage)
        stage.task.cancel()
        await asyncio.wait({stage.task})
        assert stage.task.cancelled()
        for worker in told:
            await until(lambda worker=worker: worker.aborted == [worker.submitted[0].request.request_id])
        others = [worker for worker in stage.prefill + stage.decode if worker not in told]
        assert [worker.aborted for worker in others] == [[]] * len(others)
        stage.assert_nothing_left()

    run(body)


def test_a_sequence_cancelled_in_the_queue_reaches_no_worker_and_lets_the_next_one_in() -> None:
    async def body() -> None:
        stage = Stage(max_inflight=1)
        await stage.sent(stage.prefill)
        plan = SequencePlan(BLOCK_TOKENS, (), no_cached_tokens, disaggregated=True)

        async def another(name: str) -> None:
            request = EngineRequest(name, PROMPT, SamplingParams(max_tokens=8))
            async with aclosing(SequenceFlow(request, plan, stage.dispatcher).events()) as events:
                async for _ in events:
                    pass

        queued = [asyncio.create_task(another(name)) for name in ("second", "third")]
        await until(lambda: stage.dispatcher.num_waiting == 2)
        queued[0].cancel()
        await asyncio.wait({queued[0]})
        assert stage.dispatcher.num_waiting == 1
        stage.task.cancel()
        await stage.sent(stage.prefill, count=2)
        assert [sent.request.request_id for sent in stage.prefill[0].submitted] == ["r.0", "third.0"]
        stage.prefill[0].give(1, FINISH_LENGTH)
        await queued[1]
        stage.assert_nothing_left()

    run(body)


async def lose_prefill(stage: Stage) -> PlainWorker:
    return await stage.sent(stage.prefill)


async def lose_prefill_after_the_first_token(stage: Stage) -> PlainWorker:
    prefill = await stage.sent(stage.prefill)
    prefill.give(10)
    await stage.has(10)
    return prefill


async def lose_decode(stage: Stage) -> PlainWorker:
    return (await stage.to_decode())[1]


async def lose_decode_in_mid_stream(stage: Stage) -> PlainWorker:
    _, decode = await stage.to_decode()
    decode.give(11)
    decode.give(12)
    await stage.has(10, 11, 12)
    return decode


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "leaves"])
@pytest.mark.parametrize(
    "bring", [lose_prefill, lose_prefill_after_the_first_token, lose_decode, lose_decode_in_mid_stream]
)
def test_a_sequence_whose_worker_is_lost_goes_on_elsewhere_after_its_last_token(
    bring: Callable[[Stage], Awaitable[PlainWorker]], dies: bool
) -> None:
    async def body() -> None:
        stage = Stage(prefill=2, decode=2)
        await until(lambda: not stage.dispatcher.missing_roles())
        lost = await bring(stage)
        before = list(stage.tokens)
        first_id = lost.submitted[0].request.request_id
        others = [worker for worker in stage.prefill + stage.decode if worker is not lost]
        sent_before = {worker.worker_id: len(worker.submitted) for worker in others}
        if dies:
            lost.die(ActorDiedError())
        else:
            stage.list_members(others)
        again = [worker for worker in stage.prefill if worker is not lost]
        await until(lambda: any(len(w.submitted) > sent_before[w.worker_id] for w in again))
        prefill = next(w for w in again if len(w.submitted) > sent_before[w.worker_id])
        resumed = prefill.submitted[-1].request
        assert list(resumed.output_token_ids) == before
        assert resumed.request_id != first_id
        prefill.give(100)
        stage.hand_over(prefill)
        decoders = [worker for worker in stage.decode if worker is not lost]
        await until(lambda: any(len(w.submitted) > sent_before[w.worker_id] for w in decoders))
        decode = next(w for w in decoders if len(w.submitted) > sent_before[w.worker_id])
        decode.give(101, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [*before, 100, 101]
        assert [member.worker_id for member in stage.suspects] == ([lost.worker_id] if dies else [])
        stage.assert_nothing_left()

    run(body)


@pytest.mark.parametrize("bring", [lose_prefill, lose_decode_in_mid_stream])
def test_a_sequence_that_lost_its_only_worker_waits_for_its_successor_even_where_nothing_may_wait(
    bring: Callable[[Stage], Awaitable[PlainWorker]],
) -> None:
    async def body() -> None:
        stage = Stage(max_queued=0)
        lost = await bring(stage)
        before = list(stage.tokens)
        lost.die(ActorDiedError())
        await until(lambda: stage.dispatcher.num_waiting == 1)
        successor = PlainWorker("successor", lost.role)
        workers = [successor if worker is lost else worker for worker in stage.prefill + stage.decode]
        stage.prefill = [worker for worker in workers if worker.role == "prefill"]
        sent_before = len(stage.prefill[0].submitted)
        stage.list_members(workers)
        await until(lambda: len(stage.prefill[0].submitted) > sent_before)
        stage.prefill[0].give(100, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [*before, 100]
        stage.assert_nothing_left()

    run(body)


def test_a_sequence_that_lost_so_many_workers_ends_with_an_error() -> None:
    async def body() -> None:
        stage = Stage(prefill=MAX_ATTEMPTS)
        await until(lambda: len([link for link in stage.dispatcher.links if link.load is not None]) == MAX_ATTEMPTS + 1)
        for attempt in range(MAX_ATTEMPTS):
            await until(lambda count=attempt + 1: sum(len(w.submitted) for w in stage.prefill) == count)
            next(w for w in stage.prefill if w.submitted and not w._death.done()).die(ActorDiedError())
        with pytest.raises(RequestFailedError, match="not tried again"):
            await stage.task
        stage.assert_nothing_left()

    run(body)


@pytest.mark.parametrize("in_decode", [False, True])
def test_a_worker_s_error_ends_the_sequence_at_once(in_decode: bool) -> None:
    async def body() -> None:
        stage = Stage()
        worker = (await stage.to_decode())[1] if in_decode else await stage.sent(stage.prefill)
        worker.give(None, FINISH_ERROR, error="logits hold NaN")
        with pytest.raises(RequestFailedError, match="NaN"):
            await stage.task
        assert [w.aborted for w in stage.decode] == [[]]
        stage.assert_nothing_left()

    run(body)


def test_a_grammar_that_a_worker_cannot_use_is_told_from_its_own_failures() -> None:
    async def body() -> None:
        stage = Stage()
        worker = await stage.sent(stage.prefill)
        worker.give(None, FINISH_ERROR, error="too many items", blames_grammar=True)
        with pytest.raises(GrammarFailedError, match="too many items"):
            await stage.task
        stage.assert_nothing_left()

    run(body)


def test_a_sequence_waits_for_a_role_that_nobody_plays_at_the_moment() -> None:
    async def body() -> None:
        stage = Stage(decode=0)
        await until(lambda: stage.dispatcher.num_waiting == 1)
        stage.decode.append(PlainWorker("d", "decode"))
        stage.list_members(stage.prefill + stage.decode)
        _, decode = await stage.to_decode()
        decode.give(11, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [10, 11]

    run(body)


def test_events_are_those_of_the_present_attempt_only() -> None:
    async def body() -> None:
        stage = Stage(prefill=2)
        await until(lambda: not stage.dispatcher.missing_roles())
        first = await stage.sent(stage.prefill)
        stage.list_members([worker for worker in stage.prefill + stage.decode if worker is not first])
        second = next(worker for worker in stage.prefill if worker is not first)
        await until(lambda: len(second.submitted) == 1)
        first.give(66)  # the worker that left had not heard yet
        second.give(10, FINISH_LENGTH)
        await stage.task
        assert stage.tokens == [10]

    run(body)
