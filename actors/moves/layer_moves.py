"""The home's side of a move of layers or heads: copy while serving, hold the steps, copy what is new, switch, let go.

Before the switch, which is one call in the engine's thread, nothing has changed for the instance: whatever goes wrong
until then gives back what was taken, and the move was none.

Each call in an engine's thread waits for the step that this is in, which under load takes longer than all copies. So
there are few: while steps go on the home's engine is asked twice, at the beginning and to hold its steps, and once
more when weights have crossed; the host's once, for the grant or to take back what it had (`migrate.prediction` counts
on that).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from actors.engine.engine import Engine
from actors.engine.grants import BlocksWanted, Grant
from actors.engine.hosting import HostedInstance
from actors.engine.lane_table import Lane
from actors.engine.module_transfer import PageChunk
from actors.engine.room import GrantRefusedError, NotNowError
from actors.engine.stages import stages_of
from actors.moves.copying import some_at_a_time
from actors.moves.instance_home import InstanceHome, QuestionFailedError, to_its_end
from actors.moves.questions import (
    Fields,
    GrantRequest,
    Kind,
    encode,
    encode_chunk,
    encode_grant,
    lanes_of,
)
from migrate.move_report import MoveFailedError, MoveReport
from migrate.moves import HeadMove, Move
from migrate.placement import Placement

_CHUNK_BYTES = 4 << 20
"""Pages in one question: what a step's hidden states may have to wait for on the link."""
_PATIENCE_S = 3.0
"""For so long room at home is asked for again while copies hold blocks that are to go. To be refused costs a move a
cool-down, and a copy takes a tenth of a second."""
_PAUSE_S = 0.25
_ROOM_TRIES = 3
"""Times that a host is asked for room: after the first the home has given up some of its own."""


@dataclass(slots=True)
class _Tally:
    weight_bytes: int = 0
    kv_bytes: int = 0
    held_s: float = 0.0
    pool_blocks: int = 0
    """At the end."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """Of the home's engine, when a move begins."""

    wanted: BlocksWanted
    fingerprint: bytes
    content: tuple[int, list[int]]
    """See `LayerMoves._content`."""


class LayerMoves:
    """Moves layers and heads of this worker's instance, one move at a time. Used from the worker's event loop.

    Args:
        drops_cached: KV that no request refers to is forgotten, and does not move: the store has it.
    """

    def __init__(self, home: InstanceHome, *, drops_cached: bool = False) -> None:
        self._home = home
        self._drops_cached = drops_cached
        self.checksums: dict[int, bytes] = {}
        """Of the weights of each layer that has left."""

    async def make(self, move: Move) -> MoveReport:
        """Makes a move from home to another worker, or home again. The link between the two must be there. One that is
        cancelled was made or was none, as the placement says. Heads of the layers that are at the destination stay
        there.

        Raises:
            ValueError: a move that is none of this instance's, that ends at neither home nor begins there, or after
                which a layer elsewhere would not have all its heads.
            MoveFailedError: it was begun, and came to nothing.
        """
        async with self._home.busy(str(move)):
            after, started_s, tally = move.after(self._home.placement), time.monotonic(), _Tally()
            stages_of(after)  # which refuses now what no engine could run after the switch
            placement = self._home.placement
            home, arrived = placement.home, set(placement.lanes_on(move.destination))
            lanes = tuple(lane for lane in self._lanes(move) if lane not in arrived)
            if away := sorted(set(lanes) - set(placement.lanes_on(move.source))):
                raise ValueError(f"{move}: KV of (layer, head) {away} is not on {move.source!r}; bring it there first")
            try:
                if move.source == home:
                    await self._send(move, lanes, after, tally)
                elif move.destination == home:
                    await self._fetch(move, lanes, after, tally)
                else:
                    raise ValueError(f"{move}: modules move from home or to it; bring them home first")
            except (QuestionFailedError, GrantRefusedError) as error:
                raise MoveFailedError(f"{move}: {error}") from error
            duration_s = time.monotonic() - started_s
            return MoveReport(move, tally.weight_bytes, tally.kv_bytes, duration_s, tally.held_s, tally.pool_blocks)

    async def _send(self, move: Move, lanes: tuple[Lane, ...], after: Placement, tally: _Tally) -> None:
        host, layers = move.destination, weights_of(move)
        limit = self._home.grants.limits.get(host)  # none but moves of this instance change it
        try:
            opened, num_blocks, layers_to_copy = await self._agree(host, lanes, layers, tally)
            limit = None if limit is None else num_blocks
            for layer in layers:
                await self._note_checksum(layer)
            for layer in layers_to_copy:
                await self._send_weights(host, layer, tally)
            point, early = opened.content
            if layers_to_copy:  # which took a while: the less is left to be copied while steps are held
                point, early = await self._home.engine(self._content)
            await self._send_pages(host, lanes, early, tally)
            async with self._steps_held(tally):
                late = await self._home.engine(
                    lambda engine: self._late_blocks(engine, early, engine.scheduler.dirty_blocks.since(point))
                )
                await self._send_pages(host, lanes, late, tally)
                if host not in self._home.hosts:
                    await self._home.ask(host, Kind.USE_VERSION, encode(version=after.version))

                def switch(engine: Engine) -> None:
                    engine.use_placement(after, self._home.remote, self._home.heads)
                    engine.grants.limit_blocks(host, num_blocks)
                    engine.lanes_departed(lanes, layers)
                    tally.pool_blocks = engine.blocks.num_blocks

                await self._home.switch(after, switch)
        except BaseException:
            if self._home.placement is not after:

                async def undo() -> None:
                    await self._home.give_back(host, lanes, layers)
                    await self._home.engine(lambda engine: engine.grants.limit_blocks(host, limit))

                await to_its_end(asyncio.ensure_future(undo()))
            raise

    async def _agree(
        self, host: str, lanes: tuple[Lane, ...], layers: tuple[int, ...], tally: _Tally
    ) -> tuple[_Opened, int, Sequence[int]]:
        """The host has room for so many blocks of the instance's lanes from now on, and waits for weights of these
        layers. The pool has as many at most: it shrinks where the host has not as much room as home."""
        for _ in range(_ROOM_TRIES):
            opened = await self._home.engine_wholly(lambda engine: self._open(engine, host, lanes, layers))
            request = GrantRequest(lanes, layers, opened.wanted, opened.fingerprint)
            answer = Fields((await self._home.ask(host, Kind.GRANT, encode_grant(request))).meta)
            num_blocks = answer.number("num_blocks")
            if num_blocks >= opened.wanted.now:
                return opened, num_blocks, answer.numbers("layers")
            await self._shrink(host, num_blocks, tally)
        raise GrantRefusedError(f"{host!r} had less room each time it was asked; later there may be enough")

    def _open(self, engine: Engine, host: str, lanes: tuple[Lane, ...], layers: Sequence[int]) -> _Opened:
        """All that a move wants to know of the engine before it copies. The pool does not grow from now on."""
        wanted = _blocks_wanted(engine, host, lanes, layers)
        engine.grants.limit_blocks(host, wanted.now)
        return _Opened(wanted, engine.loaded.fingerprint, self._content(engine))

    def _content(self, engine: Engine) -> tuple[int, list[int]]:
        """This point of `DirtyBlocks`, and the blocks that can be copied from now on."""
        return engine.scheduler.dirty_blocks.point(), self._early_blocks(engine)

    async def _shrink(self, host: str, num_blocks: int, tally: _Tally) -> None:
        """The pool shrinks to what the host has room for."""

        def shrink(engine: Engine) -> tuple[None, Mapping[int, int]]:
            moved = engine.grants.shrink_pool(num_blocks) if num_blocks < engine.blocks.num_blocks else {}
            engine.grants.limit_blocks(host, engine.blocks.num_blocks)
            return None, moved

        async with self._steps_held(tally):
            await self._home.move_blocks(shrink)

    async def _fetch(self, move: Move, lanes: tuple[Lane, ...], after: Placement, tally: _Tally) -> None:
        host, layers = move.source, weights_of(move)
        try:
            point = await self._ask_for_point(host)
            granted, early = await self._make_room(lanes, layers, tally)
            for layer in granted.layers_to_copy:
                await self._fetch_weights(host, layer, tally)
            if granted.layers_to_copy:  # as in `_send`
                point = await self._ask_for_point(host)
                early = await self._home.engine(self._early_blocks)
            await self._fetch_pages(host, lanes, early, tally)
            async with self._steps_held(tally):
                written = await self._home.ask(host, Kind.DIRTY_SINCE, encode(point=point))
                dirty = Fields(written.meta).numbers("blocks")
                late = await self._home.engine(lambda engine: self._late_blocks(engine, early, dirty))
                await self._fetch_pages(host, lanes, late, tally)

                def switch(engine: Engine) -> None:
                    engine.lanes_returned()
                    engine.use_placement(after, self._home.remote, self._home.heads)
                    if host not in after.workers():
                        engine.grants.limit_blocks(host, None)
                    tally.pool_blocks = engine.blocks.num_blocks

                await self._home.switch(after, switch)
        finally:
            if self._home.placement is after:
                await self._home.give_back(host, lanes, layers)
            else:
                await self._home.engine_wholly(_abandon_return)

    async def _make_room(
        self, lanes: tuple[Lane, ...], layers: tuple[int, ...], tally: _Tally
    ) -> tuple[Grant, list[int]]:
        """Home has room for what returns, and the blocks that can be copied from now on. Waits a while for copies that
        are in the way."""

        def make_room(engine: Engine) -> tuple[tuple[Grant, list[int]], Mapping[int, int]]:
            granted = engine.lanes_returning(lanes, layers)
            return (granted, self._early_blocks(engine)), granted.moved_blocks

        until_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                async with self._steps_held(tally):
                    return await self._home.move_blocks(make_room)
            except NotNowError:
                if time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(_PAUSE_S)

    async def _ask_for_point(self, host: str) -> int:
        return Fields((await self._home.ask(host, Kind.DIRTY_POINT, encode())).meta).number("point")

    def _lanes(self, move: Move) -> tuple[Lane, ...]:
        if isinstance(move, HeadMove):
            return tuple((layer, head) for layer in move.layers for head in move.heads)
        return lanes_of(move.layers, self._home.placement.num_kv_heads)

    async def _note_checksum(self, layer: int) -> None:
        _, self.checksums[layer] = await self._home.in_thread(self._home.grants.read_own_weights, layer)

    async def _send_weights(self, host: str, layer: int, tally: _Tally) -> None:
        data, checksum = await self._home.in_thread(self._home.grants.read_own_weights, layer)
        await self._home.ask(host, Kind.WRITE_WEIGHTS, encode(layer=layer, checksum=checksum.hex()), (data,))
        tally.weight_bytes += data.nbytes

    async def _fetch_weights(self, host: str, layer: int, tally: _Tally) -> None:
        answer = await self._home.ask(host, Kind.READ_WEIGHTS, encode(layer=layer))
        (data,), checksum = answer.tensors, Fields(answer.meta).hex("checksum")
        await self._home.in_thread(self._returning.write_weights, layer, data, checksum)
        tally.weight_bytes += data.nbytes

    async def _send_pages(self, host: str, lanes: Sequence[Lane], blocks: Sequence[int], tally: _Tally) -> None:
        async def send(chunk: PageChunk) -> None:
            data = await self._home.in_thread(self._home.grants.read_own, chunk)
            await self._home.ask(host, Kind.WRITE_PAGES, encode_chunk(chunk), (data,))
            tally.kv_bytes += data.nbytes

        await some_at_a_time(send, self._home.grants.page_chunks(lanes, blocks, _CHUNK_BYTES))

    async def _fetch_pages(self, host: str, lanes: Sequence[Lane], blocks: Sequence[int], tally: _Tally) -> None:
        returning = self._returning

        async def fetch(chunk: PageChunk) -> None:
            (data,) = (await self._home.ask(host, Kind.READ_PAGES, encode_chunk(chunk))).tensors
            await self._home.in_thread(returning.write_pages, chunk, data)
            tally.kv_bytes += data.nbytes

        await some_at_a_time(fetch, self._home.grants.page_chunks(lanes, blocks, _CHUNK_BYTES))

    @property
    def _returning(self) -> HostedInstance:
        returning = self._home.grants.returning
        assert returning is not None
        return returning

    def _early_blocks(self, engine: Engine) -> list[int]:
        """Full blocks, which are copied while the instance serves."""
        return engine.blocks.findable(live_only=self._drops_cached)

    def _late_blocks(self, engine: Engine, early: Sequence[int], written: Sequence[int]) -> list[int]:
        """Blocks with content that were not copied early, or were written after that."""
        copied = set(early).difference(written)
        if self._drops_cached:
            engine.blocks.drop_cached(spared=copied)
        return [block for block in engine.blocks.occupied() if block not in copied]

    @contextlib.asynccontextmanager
    async def _steps_held(self, tally: _Tally) -> AsyncIterator[None]:
        started_s = time.monotonic()
        try:
            async with self._home.steps_held():
                yield
        finally:
            tally.held_s += time.monotonic() - started_s


def _blocks_wanted(engine: Engine, host: str, lanes: tuple[Lane, ...], layers: Sequence[int]) -> BlocksWanted:
    """What stays at home, and other hosts, may have room for more than the pool has; live requests need theirs."""
    grants, blocks = engine.grants, engine.blocks
    others = [num_blocks for worker, num_blocks in grants.limits.items() if worker != host]
    most = max(blocks.num_blocks, min(grants.blocks_without(lanes, layers), *others, sys.maxsize))
    least = min(blocks.num_blocks, max(grants.promised_blocks, -(-blocks.num_live * 5 // 4)))
    return BlocksWanted(least, blocks.num_blocks, most, blocks.num_live)


def _abandon_return(engine: Engine) -> None:
    if engine.grants.returning is not None:
        engine.grants.abandon_return()


def weights_of(move: Move) -> tuple[int, ...]:
    """Layers whose weights move too."""
    return () if isinstance(move, HeadMove) else tuple(move.layers)
