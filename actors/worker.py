"""The Worker actor: owns a device, the engine on it and the worker's dealings with the store (design decision D1).

Everything heavy runs off the event loop: steps in the engine's thread, copies into and out of pages in a pool. The loop
passes messages and verifies what was fetched (a checksum at tens of GB/s). A request is freed by exactly one of: its
last token, an abort, the end of its export, or the silence of the ingress it belongs to (`actors.request_tracker`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util import get_node_ip_address

from actors.addresses import StoreAddress
from actors.direct_line import LineServer
from actors.engine.config import EngineConfig
from actors.messages import Submission, WorkerFacts, WorkerMessage
from actors.model_source import resolve_model
from actors.outbox import Outbox
from actors.worker_metrics import worker_readings
from actors.worker_settings import MoveLimits, WorkerSettings
from kv.metrics.ray_exporter import RayExporter
from kv.metrics.table import Readings
from kv.part_range import PartRange
from migrate.load import RateEstimate
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import Move
from migrate.placement_state import PlacementState
from migrate.worker_reading import WorkerReading

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from actors.engine.engine import Engine, StepResult
    from actors.engine.grammar import Grammars
    from actors.load_report import LoadSnapshot
    from actors.moves.worker_moves import WorkerMoves
    from migrate.links.rendezvous import RendezvousAddress

_RATE_HALF_LIFE_TOKENS = 4096.0
_HOUSEKEEPING_PERIOD_S = 1.0
_PULL_STEPS = 4
"""Waits of a pull that are limited one by one: for the directory (twice), the parts, and another pull's blocks."""

logger = logging.getLogger("ray.serve")


class Worker:
    """See the module. A plain actor: its methods are called by ingresses, node stores and its own replica."""

    async def __init__(self, worker_id: str, settings: WorkerSettings) -> None:  # type: ignore[misc]  # Ray awaits it
        """Loads the model and starts the engine. Raises what is wrong with model or settings."""
        # Imported here, not above: the replica's shell imports this module for its class and needs no torch.
        from actors.engine_thread import EngineThread
        from actors.fetch_rates import FetchRates
        from actors.kv_exchange import KvExchange
        from actors.load_report import LoadSnapshot
        from actors.request_tracker import RequestTracker

        self._worker_id = worker_id
        self._settings = settings
        self._outbox = Outbox()
        self._rate = RateEstimate(settings.prefill_tokens_per_s, _RATE_HALF_LIFE_TOKENS)
        self._counts: Counter[str] = Counter()
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._snapshot: LoadSnapshot = LoadSnapshot()
        self._engine, grammars, folder = await asyncio.to_thread(_make_engine, settings)
        self._thread = EngineThread(self._engine, self._after_turn, on_failure=self._after_failure)
        self._defect: str | None = None
        self._moves: WorkerMoves | None = None
        if settings.moves is not None:
            self._start_moves(settings.moves, folder)
        self._exchange = KvExchange(
            self._engine.loaded,
            FetchRates(lambda: self._rate.per_s, step_s=lambda: self._engine.counters.mean_step_s),
            lease_s=settings.lease_s,
            fetch_timeout_s=settings.fetch_timeout_s,
            publish_timeout_s=_PULL_STEPS * settings.pull_timeout_s,
            shares_prefixes=settings.share_prefixes,
            pages=None if self._moves is None else self._moves.pages(settings.fetch_timeout_s),
        )
        actor = ray.get_runtime_context().current_actor
        stores_answers = settings.role != "prefill" and settings.share_prefixes
        self._requests = RequestTracker(
            self._thread,
            self._exchange,
            self._outbox,
            actor,
            grammars,
            max_publishing_answers=settings.max_publishing_answers if stores_answers else 0,
        )
        # A turn without work, so that the first report does not wait for the first request.
        await asyncio.wrap_future(self._thread.call(lambda _: None))
        self._lines = LineServer(self.collect)
        self._line_address = await self._lines.start(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._metrics = RayExporter()
        self._housekeeper = asyncio.create_task(self._keep_house())

    def __repr__(self) -> str:
        """What Ray shows of it, in its dashboard and before its lines of the log."""
        return f"Worker({self._worker_id})"

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
            line=self._line_address,
        )

    async def use_store(self, store: StoreAddress) -> None:
        """The global store to deal with from now on."""
        self._exchange.use_store(store)

    async def submit(self, submissions: Sequence[Submission]) -> None:
        """Takes requests in, and does not wait. What becomes of them comes by `collect`, a refusal included."""
        for submission in submissions:
            self._requests.submit(submission)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Frees requests wherever they are; unknown ones are ignored, since they may have ended by themselves, and
        refused should they come later."""
        for request_id in request_ids:
            self._requests.abort(request_id)

    async def collect(self, owner: str, timeout_s: float) -> WorkerMessage:
        """All news for one ingress since its last call, waiting for some up to `timeout_s`; always with a load
        report."""
        message = await self._outbox.collect(owner, timeout_s)
        message.load = self._snapshot.report(
            self._worker_id, self._settings.epoch, self._settings.role, self._rate.per_s, owner
        )
        return message

    async def export(self, export_id: str, ranges: Sequence[PartRange]) -> list[NDArray[np.uint8]]:
        """For the node's store: the encoded parts of a request's KV, which this worker holds until the pull is over.
        Raises LookupError when its blocks were given back before they were read: they may be another request's."""
        try:
            held = self._engine.export_content(export_id)
            return await asyncio.to_thread(self._exchange.export, ranges, held)
        finally:
            if not self._engine.holds_export(export_id):
                raise LookupError(f"the KV of request {export_id!r} is not held any more")

    async def wait_closed(self) -> None:
        """Does not return before `close`; fails the moment the process dies or its engine does, which is what callers
        wait for."""
        await self._closed.wait()
        problem = self._thread.failure or self._defect
        if problem is not None:
            raise RuntimeError(f"worker {self._worker_id}: {problem}")

    async def close(self) -> None:
        """Ends the engine; the actor may be killed then."""
        self._closed.set()
        self._housekeeper.cancel()

        def end() -> None:
            if self._moves is not None:
                self._moves.close()
            self._thread.stop()

        # Not in a thread of `asyncio.to_thread`: in all of those may be copies that wait for what is ended here.
        await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1, "close"), end)
        self._lines.close()

    async def check_health(self, stall_timeout_s: float) -> None:
        """Raises RuntimeError when a turn of the engine takes longer than that, its thread ended, or its books do not
        add up."""
        problem = self._thread.failure or self._thread.defect or self._defect
        stalled_s = self._thread.stalled_s()
        if problem is None and stalled_s > stall_timeout_s:
            problem = f"a step has been running for {stalled_s:.0f} s"
        if problem is not None:
            raise RuntimeError(f"worker {self._worker_id}: {problem}")

    async def link(self, peer: str, epoch: int, rendezvous: RendezvousAddress) -> None:
        """Makes a link to another worker, which does the same. Raises LinkError, or MoveFailedError where layers do not
        move."""
        moves = self._need_moves()
        self._connector.rendezvous = rendezvous
        await moves.link(peer, epoch)

    async def link_epoch(self, peer: str) -> int | None:
        """Of the link to another worker, if there is one that lives."""
        return self._need_moves().link_epoch(peer)

    async def unlink(self, peer: str) -> None:
        """Another worker has left, and will not come back under its id."""
        self._need_moves().unlink(peer)

    async def move(self, move: Move) -> MoveReport:
        """Makes a move of this worker's instance. The link to the other end must be there. Raises MoveFailedError."""
        return await self._need_moves().move(move)

    async def placement_state(self) -> PlacementState:
        """Where its instance lies, and what it does for others. Raises MoveFailedError where layers do not move."""
        return await self._need_moves().state()

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, all numbers, some of them by tier or by metric label."""

        def read(engine: Engine) -> dict[str, Any]:
            return {
                **asdict(engine.counters),
                "preemptions": engine.scheduler.num_preemptions,
                "begun_anew_requests": engine.scheduler.num_begun_anew,
                "answers_given_up": engine.scheduler.exports.num_given_up,
                "evicted_blocks": engine.blocks.num_evictions,
                "total_blocks": engine.blocks.num_blocks,
                "live_blocks": engine.blocks.num_live,
                "cached_blocks": engine.blocks.num_cached,
                "live_requests": engine.num_live_requests,
            }

        stats, exchanged = await asyncio.wrap_future(self._thread.call(read)), self._exchange.counts
        return {
            **stats,
            **self._counts,
            **self._requests.counts,
            "pid": os.getpid(),
            "tracked_requests": len(self._requests),
            "store_lookups": exchanged.lookups,
            "store_queried_tokens": exchanged.queried_tokens,
            "store_found_tokens": dict(exchanged.found_tokens),
            "store_hit_tokens": dict(exchanged.hit_tokens),
            "fetch_declined_tokens": exchanged.declined_tokens,
            "fetch_bytes_per_s": self._exchange.rates.bytes_per_s(),
            "store_misses": dict(self._exchange.misses + self._exchange.refusals),
        }

    async def reading(self) -> WorkerReading:
        """For the controller of moves: what this worker has done, and what its steps cost."""
        from actors.planner_reading import take_reading

        def read(engine: Engine) -> WorkerReading:
            epoch, cached_stays = self._settings.epoch, self._settings.share_prefixes
            return take_reading(self._worker_id, engine, time.monotonic(), epoch=epoch, store_has_cached=cached_stays)

        return await asyncio.wrap_future(self._thread.call(read))

    def _start_moves(self, limits: MoveLimits, folder: Path) -> None:
        from actors.moves.worker_moves import WorkerMoves
        from migrate.links.interface import LinkSettings
        from migrate.links.late_connector import LateConnector

        links = LinkSettings(limits.link_timeout_s, connect_timeout_s=limits.link_timeout_s)
        self._connector = LateConnector(self._worker_id, get_node_ip_address(), links)  # type: ignore[no-untyped-call]
        self._moves = WorkerMoves(
            self._worker_id,
            self._thread,
            self._engine,
            self._connector,
            folder,
            limits,
            deliver=lambda result: self._requests.take_turn(result),
            on_failure=self._fail,
            store_has_cached=self._settings.share_prefixes,
        )

    def _need_moves(self) -> WorkerMoves:
        if self._moves is None:
            raise MoveFailedError(f"worker {self._worker_id}: layers move in mode balanced only")
        return self._moves

    def _fail(self, reason: str) -> None:
        """It is of no use any more, and whoever waits for its end is told."""
        self._defect = reason
        self._closed.set()

    def _after_turn(self, engine: Engine, result: StepResult) -> None:
        """In the engine's thread, after each of its turns."""
        from actors.load_report import take_snapshot

        self._in_loop(self._take_turn, take_snapshot(engine), result)

    def _take_turn(self, snapshot: LoadSnapshot, result: StepResult) -> None:
        self._snapshot = snapshot
        if result.prefill_tokens:
            share = result.prefill_tokens / (result.prefill_tokens + result.decode_tokens)
            self._rate.update(result.prefill_tokens, result.duration_s * share)
        self._requests.take_turn(result)
        if result.failure is not None and self._moves is not None:
            self._moves.stage_failed(result.failure)

    def _after_failure(self) -> None:
        """In the engine's thread, at its end."""
        self._in_loop(self._closed.set)

    async def _keep_house(self) -> None:
        """Frees what belongs to ingresses that are gone, renews the leases of queued requests, and exports metrics."""
        elapsed_s = 0.0
        while True:
            await asyncio.sleep(_HOUSEKEEPING_PERIOD_S)
            self._metrics.export(self._readings())
            for owner in self._outbox.lost_owners(round(self._settings.owner_silence_s / _HOUSEKEEPING_PERIOD_S)):
                self._counts["lost_ingresses"] += 1
                num_freed = self._requests.abort_owner(owner)
                logger.warning("ingress %s is silent; its %d requests are freed", owner, num_freed)
            self._requests.forget_old()
            if self._moves is not None:
                self._moves.expire()
            elapsed_s += _HOUSEKEEPING_PERIOD_S
            if elapsed_s >= self._settings.lease_s / 3:
                elapsed_s = 0.0
                await self._exchange.renew_leases()

    def _readings(self) -> Readings:
        """Without waiting for the engine's thread, which counts meanwhile: each number by itself is right."""
        return worker_readings(
            self._settings.role,
            self._worker_id,
            self._engine.counters,
            self._snapshot,
            self._engine.scheduler.num_preemptions,
            self._exchange.counts,
            dict(self._exchange.misses),
            0 if self._moves is None else self._moves.num_repairs,
        )

    def _in_loop(self, function: Any, *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _make_engine(settings: WorkerSettings) -> tuple[Engine, Grammars, Path]:
    import torch

    from actors.engine.engine import Engine
    from actors.engine.grammar import Grammars
    from actors.engine.loading import load_model

    torch.set_num_threads(settings.torch_threads)
    config: EngineConfig = settings.engine
    folder = resolve_model(settings.model).path
    loaded = load_model(folder, config)
    return Engine(loaded, config), Grammars(folder, loaded.spec.vocab_size, loaded.spec.eos_token_ids), folder
