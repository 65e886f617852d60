"""What a worker has for moves: its links, what it hosts for others, and its own instance's moves and repairs.

Whatever two workers have of each other's lives as long as the link between them. When it ends, for whatever reason, the
host lets go of what it has, and the home takes its layers back; over a new link they begin anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from actors.engine.engine import Engine, StepResult
from actors.engine.steps_in_flight import StageFailure
from actors.engine_thread import EngineStoppedError, EngineThread
from actors.moves.granting import Granting
from actors.moves.host import MoveHost
from actors.moves.instance_home import InstanceHome
from actors.moves.layer_moves import LayerMoves
from actors.moves.page_links import PageLinks
from actors.moves.placed_pages import PlacedPages
from actors.moves.questions import Kind
from actors.moves.repair import Repairs
from actors.moves.work_links import WorkLinks
from actors.worker_settings import MoveLimits
from migrate.links.calls import LinkCalls, Question
from migrate.links.switchboard import Connector
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import Move
from migrate.placement import Placement
from migrate.placement_state import HostedPart, LinkState, PlacementState

_CLOSE_WAIT_S = 2.0

logger = logging.getLogger("ray.serve")


class WorkerMoves:
    """Used from the worker's event loop.

    Args:
        worker: its id, which is its instance's.
        connector: makes its links.
        folder: of the model, from which weights are read that a lost host had.
        deliver: given requests that a repair had to end.
        on_failure: told why a repair has failed, after which the worker is of no use.
        store_has_cached: whether KV that no request refers to can be had from the store.
    """

    def __init__(
        self,
        worker: str,
        thread: EngineThread,
        engine: Engine,
        connector: Connector,
        folder: Path,
        limits: MoveLimits,
        deliver: Callable[[StepResult], None],
        on_failure: Callable[[str], None],
        *,
        store_has_cached: bool = False,
    ) -> None:
        spec, block_tokens, tokens = engine.loaded.spec, engine.block_tokens, engine.max_context_tokens
        self._limits = limits
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._thread = thread
        self._epochs: dict[str, int] = {}
        """By peer: of the newest link that was asked for."""
        self._host = MoveHost(thread)
        self._calls = LinkCalls(worker, connector, self._serve, self._on_dead)
        work = WorkLinks(self._calls, limits.answer_timeout_s)
        self._home = InstanceHome(
            thread,
            self._calls,
            work,
            work,
            Placement.at_home(worker, spec.num_layers, spec.num_kv_heads),
            limits.answer_timeout_s,
            lambda host, reason: self._repairs.begin(host, reason),
        )
        self._moves = LayerMoves(self._home, drops_cached=store_has_cached)
        self._repairs = Repairs(self._home, folder, self._moves.checksums, deliver, on_failure)
        self._granting = Granting(self._host, self._home, self._calls)

        def promise(engine: Engine) -> None:
            engine.grants.promised_blocks = -(-tokens // block_tokens)

        thread.call(promise)

    def pages(self, timeout_s: float) -> PlacedPages:
        """The instance's pages, wherever they lie, for whoever brings KV in and gives it away. `timeout_s`: see
        `PlacedPages`."""
        return PlacedPages(self._engine, PageLinks(self._calls), timeout_s)

    async def link(self, peer: str, epoch: int) -> None:
        """Makes a link to `peer`, which does the same. What the two have of each other's over an earlier one ends.
        Raises LinkError, or what the connector raises."""
        self._epochs[peer] = max(epoch, self._epochs.get(peer, epoch))
        self._part(peer, "a new link to it is made")
        await self._repairs.settled()
        await asyncio.wrap_future(self._calls.connect(peer, epoch))

    def link_epoch(self, peer: str) -> int | None:
        """Of the link to `peer`, if there is one that lives."""
        return self._calls.epoch(peer)

    def unlink(self, peer: str) -> None:
        """The peer has left and will not come back under its id."""
        if self._epochs.pop(peer, None) is not None:
            self._calls.forget(peer)
            self._part(peer, "it has left")

    async def move(self, move: Move) -> MoveReport:
        """Makes a move of this worker's instance. Raises MoveFailedError."""
        if self._home.lock.locked():
            raise MoveFailedError(f"{move}: the instance is busy with another thing: {self._home.under_way}")
        try:
            return await asyncio.wait_for(self._moves.make(move), self._limits.move_timeout_s)
        except TimeoutError:
            raise MoveFailedError(
                f"{move}: given up after {self._limits.move_timeout_s:g} s (moves.links.move_timeout_s)"
            ) from None
        except (ValueError, EngineStoppedError) as error:
            raise MoveFailedError(str(error)) from error

    def stage_failed(self, failure: StageFailure) -> None:
        """Another worker has not run its part of a step."""
        self._repairs.begin(failure.worker, failure.reason)

    @property
    def num_repairs(self) -> int:
        """See `PlacementState.repairs`."""
        return self._repairs.count

    def expire(self) -> None:
        """To be called now and then: ends questions that have not been answered in time."""
        self._calls.expire(time.monotonic())

    async def state(self) -> PlacementState:
        """What there is to know of it now."""
        links = {
            peer: LinkState(epoch, counters.bytes_sent, counters.bytes_received)
            for peer, (epoch, counters) in self._calls.counters().items()
        }

        def read(engine: Engine) -> PlacementState:
            arena, memory, lanes = engine.loaded.arena, engine.loaded.layer_memory, engine.loaded.lanes
            lane_bytes = arena.slab_bytes * len(lanes.lanes)
            return PlacementState(
                placement=self._home.placement,
                under_way=self._home.under_way,
                repairs=self._repairs.count,
                pool_blocks=engine.blocks.num_blocks,
                memory_bytes=arena.num_slabs * arena.slab_bytes,
                weight_bytes=sum(memory.packed_bytes(layer) for layer in memory.slabs),
                kv_bytes=lanes.slabs_each * lane_bytes,
                hosted=tuple(
                    HostedPart(
                        instance,
                        tuple(sorted(hosted.layers)),
                        hosted.num_blocks,
                        hosted.lanes.slabs_each * len(hosted.lanes.lanes) * arena.slab_bytes,
                        dict(hosted.layer_steps),
                    )
                    for instance, hosted in sorted(engine.grants.instances.items())
                ),
                granted_blocks=dict(engine.grants.limits),
                links=links,
                layer_steps=tuple(engine.layer_steps),
            )

        return await self._home.engine(read)

    def close(self) -> None:
        """Ends all links: peers take their modules home, and let go of this worker's. Waits for their threads."""
        self._calls.close(_CLOSE_WAIT_S)
        self._host.close()

    def _serve(self, question: Question) -> None:
        """From a thread of a link."""
        if question.message.kind in (Kind.GRANT, Kind.RELEASE):
            self._in_loop(self._granting.serve, question)
        else:
            self._host.serve(question)

    def _on_dead(self, peer: str, epoch: int, reason: str) -> None:
        """From a thread of a link."""
        self._in_loop(self._link_died, peer, epoch, reason)

    def _link_died(self, peer: str, epoch: int, reason: str) -> None:
        if self._epochs.get(peer) == epoch:  # else its end was seen to when a newer one was asked for
            self._part(peer, reason)

    def _part(self, peer: str, reason: str) -> None:
        """What the two have of each other's ends."""

        def let_go(engine: Engine) -> None:
            if peer in engine.grants.instances:
                logger.warning("worker %s is gone (%s); what it had here is released", peer, reason)
                engine.release(peer)

        self._thread.call(let_go)
        # During a move the placement may be just about to change.
        if peer in self._home.hosts or self._home.lock.locked():
            self._repairs.begin(peer, reason)

    def _in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
