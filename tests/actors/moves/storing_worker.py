"""A worker with layers elsewhere and dealings with a store, without Ray: all that a Worker actor has but the actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.grammar import Grammars
from actors.engine.request import EngineRequest
from actors.fetch_rates import FetchRates
from actors.kv_exchange import KvExchange
from actors.messages import HandOver, Submission
from actors.moves.page_links import PageLinks
from actors.moves.placed_pages import PlacedPages
from actors.outbox import Outbox
from actors.request_tracker import RequestTracker
from kv.part_range import PartRange
from migrate.links.memory_network import MemoryNetwork
from tests.actors.moves.linked_worker import TIMEOUT_S, LinkedWorker, moves_of
from tests.actors.moves.part_shelf import PartShelf


class CountedPages(PlacedPages):
    """Counts the parts that have been written."""

    num_written = 0

    def write(self, *arguments: Any) -> None:
        super().write(*arguments)
        self.num_written += 1


class StoringWorker(LinkedWorker):
    """Made in the event loop that it is used from."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: EngineConfig,
        network: MemoryNetwork,
        shelf: PartShelf,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.outbox = Outbox()
        self.tokens_per_s = 1e-3
        """How fast it computes prompts, by its own estimate: so slowly that every fetch pays and is worth an early
        start."""
        super().__init__(name, folder, config, network)
        loaded = self.engine.loaded
        self.pages = CountedPages(self.engine, PageLinks(self.calls), TIMEOUT_S)
        self.exchange = KvExchange(
            loaded,
            FetchRates(lambda: self.tokens_per_s, step_s=lambda: 0.0),
            lease_s=600.0,
            fetch_timeout_s=TIMEOUT_S,
            publish_timeout_s=TIMEOUT_S,
            pages=self.pages,
        )
        self.exchange.use_store(shelf.address())
        grammars = Grammars(folder, loaded.spec.vocab_size, ())
        self.tracker = RequestTracker(self.thread, self.exchange, self.outbox, self, grammars, max_publishing_answers=0)
        self.moves = moves_of(self)

    async def export(self, export_id: str, ranges: Sequence[PartRange]) -> list[NDArray[np.uint8]]:
        """As `Worker.export`."""
        try:
            held = self.engine.export_content(export_id)
            return await asyncio.to_thread(self.exchange.export, ranges, held)
        finally:
            if not self.engine.holds_export(export_id):
                raise LookupError(f"the KV of request {export_id!r} is not held any more")

    async def serve(
        self, request: EngineRequest, hand_over: HandOver | None = None
    ) -> tuple[list[int], HandOver | None]:
        """Tokens of a request to its end here, and its hand-over where it has one. It is its own owner."""
        self.tracker.submit(Submission(request, hand_over))
        tokens: list[int] = []
        while True:
            message = await self.outbox.collect(request.owner, 1.0)
            for event in message.events:
                assert event.error is None, event.error
                if event.token_id is not None:
                    tokens.append(event.token_id)
            if message.hand_overs:
                return tokens, message.hand_overs[0]
            if any(event.finish_reason is not None for event in message.events):
                return tokens, None

    async def ask_engine(self, function: object) -> object:
        return await asyncio.wrap_future(self.thread.call(function))  # type: ignore[arg-type]

    async def wait_free(self) -> None:
        """Until nothing of any request is left."""
        until_s = time.monotonic() + 60.0
        while len(self.tracker) or await self.ask_engine(lambda engine: engine.num_live_requests):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.001)
        self.engine.check_idle()

    def _on_turn(self, engine: Engine, result: StepResult) -> None:
        if result.failure is not None:
            self.failures.append(result.failure.reason)
        self._loop.call_soon_threadsafe(self.tracker.take_turn, result)
