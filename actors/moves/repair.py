"""Layers come home from a host that is lost: it died, its link did, or it could not do what it was asked for.

Their KV is gone, so requests are computed anew from their tokens; their weights are read from the model's folder. The
pool shrinks to what all layers at home leave room for, and requests that do not fit into it end with an error. No step
is run meanwhile, so that nobody sees a token that was computed from what is not there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from actors.engine.engine import Engine, StepResult
from actors.engine.grants import Grant
from actors.engine.lane_table import Lane
from actors.engine.loading import read_packed_layer
from actors.engine.module_transfer import write_weights
from actors.engine.room import GrantRefusedError
from actors.engine_thread import EngineStoppedError
from actors.moves.instance_home import InstanceHome, QuestionFailedError
from actors.moves.questions import Kind, encode, lanes_of
from migrate.moves import LayerMove
from migrate.placement import Placement

_ROOM_LIMIT_S = 60.0
"""Exports and fetches that lie where room is needed end within that, by their own time limits."""
_RETRY_S = 0.05

logger = logging.getLogger("ray.serve")


class Repairs:
    """Of one instance. Used from the worker's event loop.

    Args:
        folder: of the model.
        checksums: by layer that has left, of its weights: those that are read must be the same.
        deliver: given the requests that had to end.
        on_failure: told why a repair has failed, after which the worker is of no use.
    """

    def __init__(
        self,
        home: InstanceHome,
        folder: Path,
        checksums: dict[int, bytes],
        deliver: Callable[[StepResult], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self.count = 0
        """Hosts whose layers were taken home."""
        self._home = home
        self._folder = folder
        self._checksums = checksums
        self._deliver = deliver
        self._on_failure = on_failure
        self._lost: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self, host: str, reason: str) -> None:
        """A host is lost, or may be: if it has nothing of the instance, nothing changes. Does not wait."""
        self._lost.setdefault(host, reason)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._repair_all())

    async def settled(self) -> None:
        """Waits until nothing is lost any more, or that has failed."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def _repair_all(self) -> None:
        try:
            async with self._home.busy("taking layers home from a lost host"):
                repaired: set[str] = set()
                async with self._home.steps_held():
                    while self._lost:
                        lost = dict(self._lost)
                        if await self._repair(lost):
                            repaired |= lost.keys()
                            self._lost = {host: reason for host, reason in self._lost.items() if host not in lost}
                for host in repaired:  # which may live, and then is to hear of it
                    await self._home.give_back(host, (), ())
        except EngineStoppedError:
            return  # the worker ends
        except Exception as error:  # whatever it is: without its layers the instance serves nobody
            logger.exception("layers could not be taken home")
            self._on_failure(f"layers could not be taken home: {type(error).__name__}: {error}")

    async def _repair(self, lost: Mapping[str, str]) -> bool:
        """Whether it is done; False when it turned out meanwhile that more are lost."""
        after, layers = self._home.placement, list[int]()
        for host, reason in lost.items():
            run = after.layers_on(host)
            if run:
                logger.warning("worker %s is lost (%s); its layers %s come home", host, reason, list(run))
                after = LayerMove(after.home, run[0], len(run), host, after.home).after(after)
                layers += run
        if not layers:
            await self._home.engine(_void_after_failure)
            return True
        granted = await self._make_room(lanes_of(layers, after.num_kv_heads), layers)
        for layer in granted.layers_to_copy:
            await self._read_weights(layer)
        if not await self._tell(after):
            await self._home.engine(lambda engine: engine.grants.abandon_return())
            return False

        def switch(engine: Engine) -> None:
            engine.lanes_returned()
            engine.use_placement(after, None if after.is_home else self._home.remote)
            for host in lost:
                engine.grants.limit_blocks(host, None)

        await self._home.adopt(after, switch)
        self.count += len(lost)
        return True

    async def _make_room(self, lanes: Sequence[Lane], layers: Sequence[int]) -> Grant:
        until_s = time.monotonic() + _ROOM_LIMIT_S
        while True:
            self._deliver(await self._home.engine(lambda engine: _make_way(engine, lanes, layers)))
            try:
                return await self._home.engine(lambda engine: engine.lanes_returning(lanes, layers, in_need=True))
            except GrantRefusedError:
                # Copies of exports and fetches are in the way, which end by themselves.
                if time.monotonic() > until_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _read_weights(self, layer: int) -> None:
        spec, memory, dtype = await self._home.engine(
            lambda engine: (engine.loaded.spec, engine.loaded.layer_memory, engine.loaded.arena.pages.dtype)
        )
        data = await asyncio.to_thread(read_packed_layer, self._folder, spec, dtype, layer)
        await self._home.engine(lambda _: write_weights(memory, layer, data, self._checksums[layer]))

    async def _tell(self, after: Placement) -> bool:
        """Whether all hosts that stay have heard of the new placement. The others are lost too."""
        before = len(self._lost)
        for host in sorted(after.workers() - {after.home}):
            try:
                await self._home.ask(host, Kind.USE_VERSION, encode(version=after.version))
            except QuestionFailedError as error:
                self._lost.setdefault(host, str(error))
        return len(self._lost) == before


def _void_after_failure(engine: Engine) -> None:
    """The layers came home, but not before a step was lost."""
    if engine.failure is not None:
        engine.recompute_lost(all_content=True)


def _make_way(engine: Engine, lanes: Sequence[Lane], layers: Sequence[int]) -> StepResult:
    engine.recompute_lost(all_content=True)
    num_tokens = engine.grants.blocks_after_return(lanes, layers) * engine.block_tokens
    return engine.fail_longer_than(
        num_tokens,
        f"a worker that ran a part of the model is lost; without it there is room for {num_tokens} tokens, and the "
        "request may need more",
    )
