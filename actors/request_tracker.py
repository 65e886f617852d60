"""A worker's requests outside its engine: what is looked up, fetched and published for each, and who it is for.

Each request has one record from `submit` until it is gone from here; every way out passes `_forget`. An abort may come
at any moment, before the submission included, and may race with the engine's thread, which is a turn ahead: whatever
the engine says of a request without a record is ignored, since its abort is on the way there.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from actors.engine.engine import StepResult
from actors.engine.exports import Export
from actors.engine.grammar import GrammarError, Grammars, GrammarState
from actors.engine.layer_arrival import LayerArrival
from actors.engine.request import FINISH_ERROR, EngineRequest, TokenEvent
from actors.engine.step_plan import Fetch
from actors.engine_thread import EngineStoppedError, EngineThread
from actors.found_prefix import FoundPrefix, tail_of
from actors.kv_exchange import KvExchange
from actors.messages import HandOver, Submission
from actors.outbox import Outbox
from kv.extents import PullReceipt, TailReceipt

T = TypeVar("T")

_MEMORY_S = 60.0
"""How long ended requests are remembered: hand-overs whose tail may still be unclaimed, and aborts that may have
overtaken their submission."""
GRAMMAR_LIMIT_S = 60.0
"""The ingress has compiled it before, within a few seconds of CPU; so this is for a machine that has none left."""

logger = logging.getLogger("ray.serve")


class _Stage(enum.Enum):
    LOOKUP = "lookup"
    """The directory is asked; the engine does not know the request."""
    ENGINE = "engine"
    FETCHING = "fetching"
    """In the engine, which waits for KV from the store."""
    PUBLISHING = "publishing"
    """Prefilled, or answered; the store pulls its KV, and its blocks are held until that is over."""


@dataclass(slots=True)
class _Tracked:
    owner: str
    stage: _Stage = _Stage.LOOKUP
    task: asyncio.Task[Any] | None = None
    """What is under way in the stages other than ENGINE."""
    found: FoundPrefix | None = None
    """What the store has, leased, until it is fetched or turns out not to be needed."""
    grammar: GrammarState | None = None
    """Made while the store is asked, for the engine."""
    refusal: str | None = None
    """Why its grammar cannot be used, so that the engine is not to have it."""
    is_answer: bool = False
    """Its KV is published when its answer has ended, and nobody waits for that."""
    is_wanted: bool = True
    """False: aborted, and only its task keeps it here."""


@dataclass(frozen=True, slots=True)
class _HandedOver:
    owner: str
    tail: TailReceipt
    until_s: float


class RequestTracker:
    """Used from the worker's event loop."""

    def __init__(
        self,
        thread: EngineThread,
        exchange: KvExchange,
        outbox: Outbox,
        actor: Any,
        grammars: Grammars,
        *,
        max_publishing_answers: int,
        grammar_limit_s: float = GRAMMAR_LIMIT_S,
    ) -> None:
        """`actor`: handle of the worker, for the store to pull from. So many answers that have ended are published at a
        time, at most; 0: none, which is right where requests end with a hand-over or there is no store. A request whose
        grammar takes longer than `grammar_limit_s` to compile ends with an error."""
        self._thread = thread
        self._exchange = exchange
        self._outbox = outbox
        self._actor = actor
        self._grammars = grammars
        self._grammar_limit_s = grammar_limit_s
        self._max_publishing_answers = max_publishing_answers
        self._publishing_answers: set[str] = set()
        self.counts: Counter[str] = Counter(published_answer_blocks=0, unpublished_answers=0, early_published_blocks=0)
        """Blocks of answers that the store took; answers that it did not get, or not whole; blocks that it took of
        prompts while they were computed."""
        self._early: set[asyncio.Task[HandOver]] = set()
        self._loop = asyncio.get_running_loop()
        self._tracked: dict[str, _Tracked] = {}
        self._handed_over: OrderedDict[str, _HandedOver] = OrderedDict()
        self._aborted: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tracked)

    def submit(self, submission: Submission) -> None:
        """Takes a request in. A request id is used once: one that was aborted before it came is not begun."""
        request_id, owner = submission.request.request_id, submission.request.owner
        self._outbox.expect(owner)
        if request_id in self._aborted or request_id in self._tracked:
            return
        tracked = self._tracked[request_id] = _Tracked(owner)
        work = self._prepare(submission, tracked)
        self._begin(tracked, _Stage.LOOKUP, work, functools.partial(self._after_lookup, submission, tracked))

    def abort(self, request_id: str) -> None:
        """Frees a request wherever it is; one that has ended already is no error."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            handed_over = self._handed_over.pop(request_id, None)
            if handed_over is not None:
                self._exchange.discard_tail(handed_over.tail)
            self._aborted[request_id] = self._loop.time() + _MEMORY_S
            return
        tracked.is_wanted = False
        if tracked.stage is _Stage.ENGINE:
            self._forget(request_id)
            self._thread.call(lambda engine: engine.abort(request_id))
        elif tracked.task is not None and tracked.stage is not _Stage.PUBLISHING:
            tracked.task.cancel()  # it ends when no copy into the request's blocks runs any more
        # An export ends by itself, once nobody reads the blocks.

    def abort_owner(self, owner: str) -> int:
        """Frees everything of an ingress that is gone; returns how many requests that were."""
        lost = [id_ for id_, tracked in self._tracked.items() if tracked.owner == owner and tracked.is_wanted]
        unclaimed = [id_ for id_, handed_over in self._handed_over.items() if handed_over.owner == owner]
        for request_id in lost + unclaimed:
            self.abort(request_id)
        return len(lost)

    def forget_old(self) -> None:
        """To be called now and then: drops the memory of requests that ended long ago."""
        now_s = self._loop.time()
        while self._aborted and next(iter(self._aborted.values())) < now_s:
            self._aborted.popitem(last=False)
        while self._handed_over and next(iter(self._handed_over.values())).until_s < now_s:
            self._handed_over.popitem(last=False)

    def take_turn(self, result: StepResult) -> None:
        """What a turn of the engine gave."""
        for fetch in result.fetches:
            tracked = self._tracked.get(fetch.sequence.request_id)
            if tracked is not None:
                self._fetch(fetch, tracked)
        ended = {event.request_id for event in result.events if event.awaits_export}
        for export in result.exports:
            if export.export_id not in ended:
                self._publish_early(export)
        self._take_events(result.events, {export.export_id: export for export in result.exports})

    def _begin(
        self,
        tracked: _Tracked,
        stage: _Stage,
        work: Coroutine[Any, Any, T],
        after: Callable[[asyncio.Task[T]], None],
    ) -> None:
        tracked.stage = stage
        tracked.task = task = asyncio.create_task(work)
        task.add_done_callback(after)

    async def _prepare(self, submission: Submission, tracked: _Tracked) -> FoundPrefix | None:
        """What the store has of it; and its grammar's state, which is made beside the loop and the engine."""
        grammar = submission.request.sampling.grammar
        if grammar is not None:
            try:
                async with asyncio.timeout(self._grammar_limit_s):
                    tracked.grammar = await asyncio.to_thread(self._grammars.state, grammar)
            except GrammarError as error:
                tracked.refusal = str(error)
            except TimeoutError:
                tracked.refusal = f"compiling it took longer than {self._grammar_limit_s:g} s"
        return await self._exchange.find(submission.request, submission.hand_over)

    def _after_lookup(self, submission: Submission, tracked: _Tracked, task: asyncio.Task[FoundPrefix | None]) -> None:
        request, found = submission.request, _result_of(task, None, "a look-up failed; nothing of it is reused")
        if not tracked.is_wanted:
            self._forget(request.request_id)
            if found is not None:
                self._exchange.give_up(found)
            self._exchange.discard_tail(tail_of(submission.hand_over))  # a look-up that never began has not
            return
        tracked.stage, tracked.task = _Stage.ENGINE, None
        if found is not None:
            tracked.found = found
            request = replace(request, external_tokens=found.num_tokens)
        if tracked.refusal is not None:
            self._take_events([replace(_failure(request, tracked.refusal), blames_grammar=True)], {})
            return
        if self._max_publishing_answers and self._exchange.has_store and not request.hand_over:
            tracked.is_answer = True
            request = replace(request, publish_beyond_blocks=0 if found is None else found.lookup.num_blocks)

        def added(future: Future[TokenEvent | None]) -> None:
            error = future.exception()
            if error is None:
                refusal = future.result()
            elif isinstance(error, EngineStoppedError):
                return  # the whole worker ends, which whoever waits for the request learns
            else:
                refusal = _failure(request, f"the worker could not take the request: {error}")
            if refusal is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._take_events, [refusal], {})

        grammar, tracked.grammar = tracked.grammar, None
        self._thread.call(lambda engine: engine.add(request, grammar)).add_done_callback(added)

    def _fetch(self, fetch: Fetch, tracked: _Tracked) -> None:
        request_id, found = fetch.sequence.request_id, tracked.found
        if found is None:  # a preempted request that did without it the first time
            self._thread.call(lambda engine: engine.fetched(request_id, fetch.first_token))
            return
        tracked.found = None

        def begin(num_tokens: int, incoming: LayerArrival) -> None:
            self._thread.call(lambda engine: engine.arriving(request_id, num_tokens, incoming))

        early = self._exchange.early_start(fetch.sequence.num_tokens - fetch.last_token, begin)
        sequence = fetch.sequence
        work = self._exchange.fetch(found, sequence.block_ids, fetch.first_token, early, sequence.mark)
        self._begin(tracked, _Stage.FETCHING, work, functools.partial(self._after_fetch, fetch, found, tracked))

    def _after_fetch(self, fetch: Fetch, found: FoundPrefix, tracked: _Tracked, task: asyncio.Task[int]) -> None:
        request_id = fetch.sequence.request_id
        num_tokens = _result_of(task, fetch.first_token, "a fetch failed; its tokens are computed")
        if task.cancelled():  # it may never have begun
            self._exchange.give_up(found)
        if self._tracked.get(request_id) is not tracked or tracked.task is not task:
            return  # it was computed meanwhile, and has ended or is being published
        if not tracked.is_wanted:
            self._forget(request_id)
            self._thread.call(lambda engine: engine.abort(request_id))
            return
        tracked.stage, tracked.task = _Stage.ENGINE, None
        self._thread.call(lambda engine: engine.fetched(request_id, num_tokens))

    def _take_events(self, events: Sequence[TokenEvent], exports: Mapping[str, Export]) -> None:
        """`exports`: of all events that await one."""
        wanted = []
        for event in events:
            tracked = self._tracked.get(event.request_id)
            if tracked is None:
                continue
            wanted.append(event)
            self._give_up(tracked)
            if event.awaits_export:
                self._begin_publishing(event, tracked, exports[event.request_id])
            elif event.finish_reason is not None:
                self._forget(event.request_id)
        if wanted:
            self._outbox.deliver(wanted)
        else:
            self._outbox.nudge()

    def _begin_publishing(self, event: TokenEvent, tracked: _Tracked, export: Export) -> None:
        """The request's part here is over. What it computed goes to the store, and its last token does not wait."""
        request_id, decode_follows = event.request_id, event.finish_reason is None
        if tracked.is_answer:
            if len(self._publishing_answers) >= self._max_publishing_answers:
                self.counts["unpublished_answers"] += 1
                self._forget(request_id)
                self._thread.call(lambda engine: engine.release_export(request_id))
                return
            self._publishing_answers.add(request_id)
        work = self._publish(export, decode_follows)
        after = functools.partial(self._after_publish, request_id, tracked, decode_follows)
        self._begin(tracked, _Stage.PUBLISHING, work, after)

    async def _publish(self, export: Export, decode_follows: bool) -> HandOver:
        num_tokens, receipt = export.num_tokens, None
        if not decode_follows:
            num_tokens = self._exchange.tokens_in(len(export.keys))  # nobody would claim the tail
        if num_tokens:
            receipt = await self._exchange.publish(self._actor, export.export_id, export.keys, num_tokens)
        return HandOver(export.export_id, num_tokens, receipt)

    def _publish_early(self, export: Export) -> None:
        """What a prompt has filled goes to the store while the rest is computed. Whatever becomes of it, or of the
        request, the blocks are held until it has ended."""
        task = asyncio.create_task(self._publish(export, decode_follows=False))
        self._early.add(task)

        def ended(_: asyncio.Task[HandOver]) -> None:
            self._early.discard(task)
            hand_over = _result_of(task, HandOver(export.export_id, 0, None), "an early publication failed")
            if isinstance(hand_over.receipt, PullReceipt):
                self.counts["early_published_blocks"] += hand_over.receipt.num_stored_blocks
            self._thread.call(lambda engine: engine.release_export(export.export_id))

        task.add_done_callback(ended)

    def _after_publish(
        self, request_id: str, tracked: _Tracked, decode_follows: bool, task: asyncio.Task[HandOver]
    ) -> None:
        nothing = HandOver(request_id, 0, None)
        hand_over = _result_of(task, nothing, "publishing failed; what is not stored will be computed again")
        self._forget(request_id)
        self._thread.call(lambda engine: engine.release_export(request_id))
        if tracked.is_answer:
            self._count_answer(hand_over.receipt)
        tail = tail_of(hand_over)
        if not (decode_follows and tracked.is_wanted):
            self._exchange.discard_tail(tail)
            return
        self._outbox.deliver_hand_over(tracked.owner, hand_over)
        if tail is not None and tail.tail_id is not None:
            self._handed_over[request_id] = _HandedOver(tracked.owner, tail, self._loop.time() + _MEMORY_S)

    def _count_answer(self, receipt: object) -> None:
        if isinstance(receipt, PullReceipt):
            self.counts["published_answer_blocks"] += receipt.num_stored_blocks
        if not isinstance(receipt, PullReceipt) or receipt.refusals:
            self.counts["unpublished_answers"] += 1

    def _give_up(self, tracked: _Tracked) -> None:
        """Ends the lease of what was found and is not needed: all of it was cached here, or the request is gone."""
        if tracked.found is not None:
            self._exchange.give_up(tracked.found)
            tracked.found = None

    def _forget(self, request_id: str) -> None:
        self._give_up(self._tracked.pop(request_id))
        self._publishing_answers.discard(request_id)


def _result_of(task: asyncio.Task[T], otherwise: T, complaint: str) -> T:
    if task.cancelled():
        return otherwise
    if (error := task.exception()) is not None:
        logger.error(complaint, exc_info=error)
        return otherwise
    return task.result()


def _failure(request: EngineRequest, reason: str) -> TokenEvent:
    return TokenEvent(request.request_id, None, FINISH_ERROR, request.owner, error=reason)
