"""What a Worker actor is where layers move, without Ray and requests' other ways: an engine in its thread, and
`WorkerMoves` over links in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from actors.engine.config import EngineConfig
from actors.engine.engine import Engine, StepResult
from actors.engine.loading import load_model
from actors.engine.request import EngineRequest, SamplingParams
from actors.engine_thread import EngineThread
from actors.moves.worker_moves import WorkerMoves
from actors.worker_settings import MoveLimits
from migrate.links.memory_network import MemoryNetwork
from migrate.move_report import MoveReport
from migrate.moves import LayerMove
from migrate.placement_state import PlacementState
from tests.link_ends import WAIT_S

LIMITS = MoveLimits(answer_timeout_s=WAIT_S, move_timeout_s=WAIT_S)


class MovingWorker:
    """Made in a running loop, from which it is used."""

    def __init__(self, name: str, folder: Path, config: EngineConfig, network: MemoryNetwork) -> None:
        self.name = name
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str | None] = {}
        """By request that has ended: its error."""
        self.failures: list[str] = []
        self._changed = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(load_model(folder, config), config)
        self.thread = EngineThread(self.engine, self._on_turn, lambda: None)
        self.moves = WorkerMoves(
            name, self.thread, self.engine, network.connector(name), folder, LIMITS, self._take, self.failures.append
        )

    async def start(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> None:
        for prompt in prompts:
            request = EngineRequest(str(len(self.tokens)), tuple(prompt), sampling)
            self.tokens[request.request_id] = []
            assert await self.on_engine(lambda engine, request=request: engine.add(request)) is None

    async def answers(self) -> list[list[int]]:
        """Once all have ended."""
        await self._until(lambda: len(self.ends) == len(self.tokens))
        return list(self.tokens.values())

    async def ended(self, count: int) -> None:
        """Until so many have."""
        await self._until(lambda: len(self.ends) >= count)

    async def tokens_more(self, count: int) -> None:
        """Until so many more tokens than now have come, or all answers have ended."""
        wanted = self._num_tokens + count
        await self._until(lambda: self._num_tokens >= wanted or len(self.ends) == len(self.tokens))

    async def on_engine(self, function: Callable[[Engine], object]) -> object:
        return await asyncio.wrap_future(self.thread.call(function))

    async def state(self) -> PlacementState:
        return await self.moves.state()

    async def state_when(self, condition: Callable[[PlacementState], bool]) -> PlacementState:
        async with asyncio.timeout(WAIT_S):
            while not condition(state := await self.moves.state()):
                await asyncio.sleep(0.01)
        return state

    async def move(self, first: int, count: int, source: MovingWorker, destination: MovingWorker) -> MoveReport:
        return await self.moves.move(LayerMove(self.name, first, count, source.name, destination.name))

    def stop(self) -> None:
        self.moves.close()
        self.thread.stop()

    @property
    def _num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    def _on_turn(self, _: Engine, result: StepResult) -> None:
        with contextlib.suppress(RuntimeError):  # the test is over
            self._loop.call_soon_threadsafe(self._take, result)

    def _take(self, result: StepResult) -> None:
        for event in result.events:
            if event.token_id is not None:
                self.tokens[event.request_id].append(event.token_id)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event.error
        if result.failure is not None:
            self.moves.stage_failed(result.failure)
        if result.events:
            self._loop.create_task(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@contextlib.asynccontextmanager
async def moving_workers(
    names: Sequence[str], folder: Path, network: MemoryNetwork, **options: object
) -> AsyncIterator[list[MovingWorker]]:
    config = EngineConfig(
        **{
            "dtype": "float32", "block_tokens": 16, "kv_cache_blocks": 96, "max_batch_tokens": 40,
            "max_running_requests": 16,
        } | options  # type: ignore[arg-type]
    )  # fmt: skip
    workers = [MovingWorker(name, folder, config, network) for name in names]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


async def join(first: MovingWorker, second: MovingWorker, epoch: int = 0) -> None:
    await asyncio.gather(first.moves.link(second.name, epoch), second.moves.link(first.name, epoch))


def memory_of(state: PlacementState) -> object:
    """What must be as it was once everything is home again."""
    return state.pool_blocks, state.weight_bytes, state.kv_bytes, state.hosted
