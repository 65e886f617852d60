"""The home's side of a move of layers or heads: copy while serving, hold the steps, copy what is new, switch, let go.

Before the switch, which is one call in the engine's thread, nothing has changed for the instance: whatever goes wrong
until then gives back what was taken, and the move was none.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from actors.engine.engine import Engine
from actors.engine.head_work import RemoteHeads
from actors.engine.lane_table import Lane
from actors.engine.module_transfer import PageChunk, page_chunks, read_chunk, read_weights, write_chunk, write_weights
from actors.engine.stage_work import RemoteStages
from actors.engine_thread import EngineThread
from actors.moves.questions import (
    Fields,
    GrantRequest,
    Kind,
    encode,
    encode_chunk,
    encode_grant,
    encode_moves,
    lanes_of,
)
from migrate.links.calls import Answer, LinkCalls, Tensors
from migrate.moves import HeadMove, Move
from migrate.placement import Placement

T = TypeVar("T")

_CHUNK_BYTES = 4 << 20
"""Pages copied between two turns of the engine."""


class MoveFailedError(Exception):
    """The move was not made; the instance serves as before. The message says why."""


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a move took."""

    move: Move
    weight_bytes: int
    kv_bytes: int
    """Pages that were copied, those that were copied twice included."""
    duration_s: float
    held_s: float
    """For so long no step began."""
    pool_blocks: int
    """Of the home's pool afterwards."""


@dataclass(slots=True)
class _Tally:
    weight_bytes: int = 0
    kv_bytes: int = 0
    held_s: float = 0.0


class LayerMoves:
    """Moves layers and heads of this worker's instance, one move at a time. Used from the worker's event loop.

    Args:
        placement: where everything lies now.
        remote: the way to layers elsewhere.
        heads: the way to heads elsewhere.
        timeout_s: a question that is not answered by then ends the move.
    """

    def __init__(
        self,
        thread: EngineThread,
        calls: LinkCalls,
        remote: RemoteStages,
        heads: RemoteHeads,
        placement: Placement,
        timeout_s: float,
    ) -> None:
        self.placement = placement
        self._thread = thread
        self._calls = calls
        self._remote = remote
        self._heads = heads
        self._timeout_s = timeout_s
        self._moving = asyncio.Lock()

    async def make(self, move: Move) -> MoveReport:
        """Makes a move from home to another worker, or home again. The link between the two must be there.

        Raises:
            ValueError: a move that is none of this instance's, or that ends at neither home nor begins there.
            MoveFailedError: it was begun, and came to nothing.
        """
        async with self._moving:
            after, started_s, tally = move.after(self.placement), time.monotonic(), _Tally()
            home, lanes = self.placement.home, set(self._lanes(move))
            if away := sorted(lanes - set(self.placement.lanes_on(move.source))):
                raise ValueError(f"{move}: KV of (layer, head) {away} is not on {move.source!r}; bring it there first")
            try:
                if move.source == home:
                    await self._send(move, after, tally)
                elif move.destination == home:
                    await self._fetch(move, after, tally)
                else:
                    raise ValueError(f"{move}: modules move from home or to it; bring them home first")
            except _QuestionFailedError as error:
                raise MoveFailedError(f"{move}: {error}") from error
            pool_blocks = await self._engine(lambda engine: engine.blocks.num_blocks)
            duration_s = time.monotonic() - started_s
            return MoveReport(move, tally.weight_bytes, tally.kv_bytes, duration_s, tally.held_s, pool_blocks)

    async def _send(self, move: Move, after: Placement, tally: _Tally) -> None:
        host, lanes, layers = move.destination, self._lanes(move), weights_of(move)
        num_blocks, fingerprint = await self._engine(
            lambda engine: (engine.blocks.num_blocks, engine.loaded.fingerprint)
        )
        request = GrantRequest(lanes, layers, num_blocks, fingerprint)
        granted = Fields((await self._ask(host, Kind.GRANT, encode_grant(request))).meta)
        try:
            for layer in granted.numbers("layers"):
                await self._send_weights(host, layer, tally)
            point, early = await self._engine(
                lambda engine: (engine.scheduler.dirty_blocks.point(), engine.blocks.findable())
            )
            await self._send_pages(host, lanes, early, tally)
            async with self._steps_held(tally):
                late = await self._engine(
                    lambda engine: _late_blocks(engine, early, engine.scheduler.dirty_blocks.since(point))
                )
                await self._send_pages(host, lanes, late, tally)
                if host not in self.placement.workers():
                    await self._ask(host, Kind.USE_VERSION, encode(version=after.version))

                def switch(engine: Engine) -> None:
                    engine.use_placement(after, self._remote, self._heads)
                    engine.grants.limit_blocks(host, granted.number("num_blocks"))
                    engine.lanes_departed(lanes, layers)

                await self._engine(switch)
                self.placement = after
        except BaseException:
            if self.placement is not after:
                await self._give_back(host, lanes, layers)
            raise

    async def _fetch(self, move: Move, after: Placement, tally: _Tally) -> None:
        host, lanes, layers = move.source, self._lanes(move), weights_of(move)
        async with self._steps_held(tally):
            granted = await self._engine(lambda engine: engine.lanes_returning(lanes, layers))
            if granted.moved_blocks:
                await self._ask(host, Kind.MOVE_BLOCKS, encode_moves(granted.moved_blocks))
        try:
            for layer in granted.layers_to_copy:
                await self._fetch_weights(host, layer, tally)
            point = Fields((await self._ask(host, Kind.DIRTY_POINT, encode())).meta).number("point")
            early = await self._engine(lambda engine: engine.blocks.findable())
            await self._fetch_pages(host, lanes, early, tally)
            async with self._steps_held(tally):
                written = Fields((await self._ask(host, Kind.DIRTY_SINCE, encode(point=point))).meta).numbers("blocks")
                late = await self._engine(lambda engine: _late_blocks(engine, early, written))
                await self._fetch_pages(host, lanes, late, tally)
                has_more = bool(after.lanes_on(host))

                def switch(engine: Engine) -> None:
                    engine.lanes_returned()
                    engine.use_placement(after, self._remote, self._heads)
                    if not has_more:
                        engine.grants.limit_blocks(host, None)

                await self._engine(switch)
                self.placement = after
        except BaseException:
            if self.placement is not after:
                await self._engine(lambda engine: engine.grants.abandon_return())
            raise
        await self._give_back(host, lanes, layers)

    def _lanes(self, move: Move) -> tuple[Lane, ...]:
        if isinstance(move, HeadMove):
            return tuple((layer, head) for layer in move.layers for head in move.heads)
        return lanes_of(move.layers, self.placement.num_kv_heads)

    async def _send_weights(self, host: str, layer: int, tally: _Tally) -> None:
        memory = await self._engine(lambda engine: engine.loaded.layer_memory)
        data, checksum = await asyncio.to_thread(read_weights, memory, layer)
        await self._ask(host, Kind.WRITE_WEIGHTS, encode(layer=layer, checksum=checksum.hex()), (data,))
        tally.weight_bytes += data.nbytes

    async def _fetch_weights(self, host: str, layer: int, tally: _Tally) -> None:
        answer = await self._ask(host, Kind.READ_WEIGHTS, encode(layer=layer))
        (data,), checksum = answer.tensors, Fields(answer.meta).hex("checksum")
        await self._engine(lambda engine: write_weights(engine.loaded.layer_memory, layer, data, checksum))
        tally.weight_bytes += data.nbytes

    async def _send_pages(self, host: str, lanes: Sequence[Lane], blocks: Sequence[int], tally: _Tally) -> None:
        for chunk in await self._chunks(lanes, blocks):

            def read(engine: Engine, chunk: PageChunk = chunk) -> torch.Tensor:
                return read_chunk(engine.loaded.arena, engine.loaded.lanes, chunk)

            data = await self._engine(read)
            await self._ask(host, Kind.WRITE_PAGES, encode_chunk(chunk), (data,))
            tally.kv_bytes += data.nbytes

    async def _fetch_pages(self, host: str, lanes: Sequence[Lane], blocks: Sequence[int], tally: _Tally) -> None:
        for chunk in await self._chunks(lanes, blocks):
            (data,) = (await self._ask(host, Kind.READ_PAGES, encode_chunk(chunk))).tensors

            def write(engine: Engine, chunk: PageChunk = chunk, data: torch.Tensor = data) -> None:
                assert engine.grants.returning is not None
                write_chunk(engine.loaded.arena, engine.grants.returning.lanes, chunk, data)

            await self._engine(write)
            tally.kv_bytes += data.nbytes

    async def _chunks(self, lanes: Sequence[Lane], blocks: Sequence[int]) -> list[PageChunk]:
        return await self._engine(
            lambda engine: list(page_chunks(engine.loaded.arena, lanes, blocks, _CHUNK_BYTES)) if blocks else []
        )

    async def _give_back(self, host: str, lanes: Sequence[Lane], layers: Sequence[int]) -> None:
        """What a host has and is no longer to have. One that cannot be told has lost it, or will when its link ends."""
        with contextlib.suppress(_QuestionFailedError):
            await self._ask(host, Kind.RELEASE, encode(lanes=list(lanes), layers=list(layers)))

    @contextlib.asynccontextmanager
    async def _steps_held(self, tally: _Tally) -> AsyncIterator[None]:
        started_s = time.monotonic()
        held = self._thread.hold_steps()
        try:
            await asyncio.wrap_future(held)
            yield
        finally:
            self._thread.resume_steps()
            tally.held_s += time.monotonic() - started_s

    async def _engine(self, function: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(function))

    async def _ask(self, peer: str, kind: Kind, meta: bytes, tensors: Tensors = ()) -> Answer:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()

        def done(answer: Answer) -> None:
            loop.call_soon_threadsafe(lambda: None if answered.done() else answered.set_result(answer))

        version, until_s = self.placement.version, time.monotonic() + self._timeout_s
        self._calls.call(peer, kind, version, meta, tensors, done, until_s)
        answer = await answered
        if answer.error is not None:
            raise _QuestionFailedError(f"{peer!r} was asked for {kind.name}: {answer.error}")
        return answer


class _QuestionFailedError(Exception):
    """The other worker did not do what it was asked for."""


def weights_of(move: Move) -> tuple[int, ...]:
    """Layers whose weights move too."""
    return () if isinstance(move, HeadMove) else tuple(move.layers)


def _late_blocks(engine: Engine, early: Sequence[int], written: Sequence[int]) -> list[int]:
    """Blocks with content that were not copied early, or were written after that."""
    copied = set(early).difference(written)
    return [block for block in engine.blocks.occupied() if block not in copied]
