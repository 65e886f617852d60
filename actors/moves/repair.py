"""Layers and heads come home from a host that is lost: it died, its link did, or it could not do what it was asked for.

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
from actors.moves.instance_home import InstanceHome

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
        """Hosts whose layers and heads were taken home."""
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
            while self._lost:  # others may have been lost while the last were told
                async with self._home.busy("taking modules home from a lost host"):
                    repaired: set[str] = set()
                    async with self._home.steps_held():
                        while self._lost:
                            lost, self._lost = self._lost, {}
                            await self._repair(lost)
                            repaired |= lost.keys()
                    for host in repaired:  # which may live, and then is to hear of it
                        await self._home.give_back(host, (), ())
        except EngineStoppedError:
            return  # the worker ends
        except Exception as error:  # whatever it is: without its modules the instance serves nobody
            logger.exception("modules could not be taken home")
            self._on_failure(f"modules could not be taken home: {type(error).__name__}: {error}")

    async def _repair(self, lost: Mapping[str, str]) -> None:
        placement = self._home.placement
        hosts = sorted(placement.workers() & lost.keys())
        if not hosts:
            await self._home.engine(_void_after_failure)
            return
        for host in hosts:
            logger.warning("worker %s is lost, and what it has comes home: %s", host, lost[host])
        lanes = [lane for host in hosts for lane in placement.lanes_on(host)]
        layers = [layer for host in hosts for layer in placement.layers_on(host)]
        granted = await self._make_room(lanes, layers)
        for layer in granted.layers_to_copy:
            await self._read_weights(layer)
        after = placement.with_all_home_from(hosts)

        def switch(engine: Engine) -> None:
            engine.lanes_returned()
            engine.use_placement(after, self._home.remote, self._home.heads)
            for host in hosts:
                engine.grants.limit_blocks(host, None)

        await self._home.switch(after, switch)
        self.count += len(hosts)

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
        data = await self._home.in_thread(read_packed_layer, self._folder, spec, dtype, layer)
        await self._home.engine(lambda _: write_weights(memory, layer, data, self._checksums[layer]))


def _void_after_failure(engine: Engine) -> None:
    """The modules came home, but not before a step was lost."""
    if engine.failure is not None:
        engine.recompute_lost(all_content=True)


def _make_way(engine: Engine, lanes: Sequence[Lane], layers: Sequence[int]) -> StepResult:
    engine.recompute_lost(all_content=True)
    engine.copy_gate.refuse()  # copies that wait for the end of this repair are in the way of what comes home
    num_tokens = engine.grants.blocks_after_return(lanes, layers) * engine.block_tokens
    return engine.fail_longer_than(
        num_tokens,
        f"a worker that ran a part of the model is lost; without it there is room for {num_tokens} tokens, and the "
        "request may need more",
    )
