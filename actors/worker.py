"""The Worker actor: owns a device, the engine on it and the worker's dealings with the store (design decision D1).

Everything heavy runs off the event loop: steps in the engine's thread, copies and checksums in a pool. The loop only
passes messages. A request is freed by exactly one of: its last token, an abort, the end of its export, or the silence
of the ingress it belongs to.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import ray

from actors.addresses import StoreAddress
from actors.engine.config import EngineConfig
from actors.messages import HandOver, Submission, WorkerFacts, WorkerMessage
from actors.model_source import resolve_model
from actors.outbox import Outbox
from actors.worker_settings import WorkerSettings
from kv.part_range import PartRange
from migrate.load import RateEstimate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from actors.engine.engine import Engine, StepResult
    from actors.engine.request import TokenEvent
    from actors.engine.scheduler import Fetch
    from actors.kv_exchange import FoundPrefix
    from actors.load_report import LoadSnapshot

_RATE_HALF_LIFE_TOKENS = 4096.0
_HOUSEKEEPING_PERIOD_S = 1.0

logger = logging.getLogger("ray.serve")


class Worker:
    """See the module. A plain actor: its methods are called by ingresses, node stores and its own replica."""

    async def __init__(self, worker_id: str, settings: WorkerSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads the model and starts the engine. Raises what is wrong with model or settings."""
        # Imported here, not above: the replica's shell imports this module for its class and needs no torch.
        from actors.engine_thread import EngineThread
        from actors.kv_exchange import KvExchange
        from actors.load_report import LoadSnapshot

        self._worker_id = worker_id
        self._settings = settings
        self._outbox = Outbox()
        self._rate = RateEstimate(settings.prefill_tokens_per_s, _RATE_HALF_LIFE_TOKENS)
        self._found: dict[str, FoundPrefix] = {}
        self._arriving: set[str] = set()
        self._cancelled: set[str] = set()
        self._fetching: dict[str, asyncio.Task[int]] = {}
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._owners: dict[str, set[str]] = {}
        self._counts: Counter[str] = Counter()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._snapshot: LoadSnapshot = LoadSnapshot()
        self._engine = await asyncio.to_thread(_make_engine, settings)
        self._exchange = KvExchange(self._engine.loaded, settings.lease_s, settings.fetch_timeout_s)
        self._thread = EngineThread(self._engine, self._after_turn)
        # A turn without work, so that the first report does not wait for the first request.
        await asyncio.wrap_future(self._thread.call(lambda _: None))
        self._housekeeper = asyncio.create_task(self._keep_house())

    async def facts(self) -> WorkerFacts:
        """What does not change in this worker's life."""
        engine, loaded = self._engine, self._engine.loaded
        return WorkerFacts(
            layout=loaded.layout,
            fingerprint=loaded.fingerprint,
            max_context_tokens=engine.max_context_tokens,
            total_blocks=engine.blocks.num_blocks,
            vocab_size=loaded.spec.vocab_size,
            eos_token_ids=loaded.spec.eos_token_ids,
            backend=loaded.backend_name,
            device=str(loaded.arena.pages.device),
        )

    async def use_store(self, store: StoreAddress) -> None:
        """The global store to deal with from now on."""
        self._exchange.use_store(store)

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Takes requests in. What becomes of them comes by `collect`, a refusal included."""
        await asyncio.gather(*(self._submit(submission) for submission in submissions))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Frees requests wherever they are; unknown ones are ignored, since they may have ended by themselves."""
        for request_id in request_ids:
            self._abort(request_id)

    async def collect(self, owner: str, timeout_s: float) -> WorkerMessage:
        """All news for one ingress since its last call, waiting for some up to `timeout_s`; always with a load
        report."""
        message = await self._outbox.collect(owner, timeout_s)
        message.load = self._snapshot.report(
            self._worker_id, self._settings.epoch, self._settings.role, self._rate.tokens_per_s, owner
        )
        return message

    async def export(self, export_id: str, ranges: Sequence[PartRange]) -> list[NDArray[np.uint8]]:
        """For the node's store: the encoded parts of a request's KV, which this worker holds until the pull is over."""
        block_ids, keys, num_tokens = await asyncio.wrap_future(
            self._thread.call(lambda engine: engine.export_content(export_id))
        )
        return await asyncio.to_thread(self._exchange.export, ranges, block_ids, keys, num_tokens)

    async def wait_closed(self) -> None:
        """Does not return before `close`; fails the moment the process dies, which is what callers wait for."""
        await self._closed.wait()

    async def close(self) -> None:
        """Ends the engine; the actor may be killed then."""
        self._closed.set()
        self._housekeeper.cancel()
        await asyncio.to_thread(self._thread.stop)

    async def check_health(self, stall_timeout_s: float) -> None:
        """Raises RuntimeError when a step takes longer than that, or the engine's books do not add up."""
        if self._thread.defect is not None:
            raise RuntimeError(f"worker {self._worker_id}: {self._thread.defect}")
        stalled_s = self._thread.stalled_s()
        if stalled_s > stall_timeout_s:
            raise RuntimeError(f"worker {self._worker_id}: a step has been running for {stalled_s:.0f} s")

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, all numbers."""

        def read(engine: Engine) -> dict[str, Any]:
            return {
                **asdict(engine.counters),
                "preemptions": engine.scheduler.num_preemptions,
                "evicted_blocks": engine.blocks.num_evictions,
                "total_blocks": engine.blocks.num_blocks,
                "live_blocks": engine.blocks.num_live,
                "cached_blocks": engine.blocks.num_cached,
                "live_requests": engine.num_live_requests,
            }

        stats = await asyncio.wrap_future(self._thread.call(read))
        return {**stats, **self._counts, "store_misses": dict(self._exchange.misses)}

    async def _submit(self, submission: Submission) -> None:
        request = submission.request
        request_id, owner = request.request_id, request.owner
        self._owners.setdefault(owner, set()).add(request_id)
        self._arriving.add(request_id)
        try:
            found = await self._exchange.find(request, submission.hand_over)
        finally:
            self._arriving.discard(request_id)
        if request_id in self._cancelled:
            self._cancelled.discard(request_id)
            if found is not None:
                self._exchange.give_up(found)
            return
        if found is not None:
            self._found[request_id] = found
            request = replace(request, external_tokens=found.num_tokens)

        def added(future: Future[TokenEvent | None]) -> None:
            if (refusal := future.result()) is not None:
                self._in_loop(self._take_events, [refusal])

        self._thread.call(lambda engine: engine.add(request)).add_done_callback(added)

    def _abort(self, request_id: str) -> None:
        if request_id in self._arriving:
            self._cancelled.add(request_id)
        elif request_id in self._fetching:
            self._fetching[request_id].cancel()  # frees it when no copy into its pages runs any more
        elif request_id not in self._publishing:  # an export frees its blocks itself, once nobody reads them
            self._give_up(request_id)
            self._thread.call(lambda engine: engine.abort(request_id))
        for requests in self._owners.values():
            requests.discard(request_id)

    def _after_turn(self, engine: Engine, result: StepResult) -> None:
        """In the engine's thread, after each of its turns."""
        from actors.load_report import take_snapshot

        self._in_loop(self._take_turn, take_snapshot(engine), result)

    def _take_turn(self, snapshot: LoadSnapshot, result: StepResult) -> None:
        self._snapshot = snapshot
        if result.prefill_tokens:
            share = result.prefill_tokens / (result.prefill_tokens + result.decode_tokens)
            self._rate.update(result.prefill_tokens, result.duration_s * share)
        for fetch in result.fetches:
            request_id = fetch.sequence.request_id
            task = asyncio.create_task(self._fetch(fetch))
            self._fetching[request_id] = task
            task.add_done_callback(functools.partial(self._after_fetch, fetch))
        self._take_events(result.events)

    def _take_events(self, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None or event.handed_over:
                self._owners.get(event.owner, set()).discard(event.request_id)
                self._give_up(event.request_id)
            if event.handed_over:
                self._publishing[event.request_id] = asyncio.create_task(
                    self._publish(event.request_id, event.owner, wanted=event.finish_reason is None)
                )
        if events:
            self._outbox.deliver(events)
        else:
            self._outbox.nudge()

    async def _fetch(self, fetch: Fetch) -> int:
        found = self._found.pop(fetch.sequence.request_id, None)
        if found is None:
            return fetch.first_token
        return await self._exchange.fetch(found, fetch.sequence.block_ids, fetch.first_token)

    def _after_fetch(self, fetch: Fetch, task: asyncio.Task[int]) -> None:
        request_id = fetch.sequence.request_id
        del self._fetching[request_id]
        if task.cancelled():
            self._give_up(request_id)
            self._thread.call(lambda engine: engine.abort(request_id))
            return
        if (error := task.exception()) is not None:
            logger.error("a fetch failed; its tokens are computed", exc_info=error)
        num_tokens = fetch.first_token if error is not None else task.result()
        self._thread.call(lambda engine: engine.fetched(request_id, num_tokens))

    async def _publish(self, request_id: str, owner: str, *, wanted: bool) -> None:
        """Has the store pull a prefilled request's KV, and tells its ingress (when a decode follows)."""
        receipt, num_tokens = None, 0
        try:
            _, keys, num_tokens = await asyncio.wrap_future(
                self._thread.call(lambda engine: engine.export_content(request_id))
            )
            actor = ray.get_runtime_context().current_actor
            receipt = await self._exchange.publish(actor, request_id, keys, num_tokens)
        finally:
            del self._publishing[request_id]
            self._thread.call(lambda engine: engine.release_export(request_id))
            if wanted:
                self._outbox.deliver_hand_over(owner, HandOver(request_id, num_tokens, receipt))

    def _give_up(self, request_id: str) -> None:
        """The lease of a request that ended without its fetch (all of it was cached here, or it was aborted)."""
        found = self._found.pop(request_id, None)
        if found is not None:
            self._exchange.give_up(found)

    async def _keep_house(self) -> None:
        """Frees what belongs to ingresses that are gone, and renews the leases of queued requests."""
        elapsed_s = 0.0
        while True:
            await asyncio.sleep(_HOUSEKEEPING_PERIOD_S)
            for owner in self._outbox.lost_owners(self._settings.owner_silence_s):
                requests = self._owners.pop(owner, set())
                self._counts["lost_ingresses"] += 1
                logger.warning("ingress %s is silent; its %d requests are freed", owner, len(requests))
                for request_id in list(requests):
                    self._abort(request_id)
            elapsed_s += _HOUSEKEEPING_PERIOD_S
            if elapsed_s >= self._settings.lease_s / 3:
                elapsed_s = 0.0
                await self._exchange.renew_leases()

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _make_engine(settings: WorkerSettings) -> Engine:
    import torch

    from actors.engine.engine import Engine
    from actors.engine.loading import load_model

    torch.set_num_threads(settings.torch_threads)
    config: EngineConfig = settings.engine
    return Engine(load_model(resolve_model(settings.model).path, config), config)
