"""What moves and repairs of a worker's own instance share: where it lies, and the ways to its engine and its hosts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from actors.engine.engine import Engine
from actors.engine.grants import Grants
from actors.engine.head_work import RemoteHeads
from actors.engine.lane_table import Lane
from actors.engine.stage_work import RemoteStages
from actors.engine_thread import EngineThread
from actors.moves.copying import COPIES_AT_A_TIME
from actors.moves.questions import Kind, encode, encode_moves
from migrate.links.calls import Answer, LinkCalls, Tensors
from migrate.placement import Placement

T = TypeVar("T")


class QuestionFailedError(Exception):
    """The other worker did not do what it was asked for, as far as is known."""


class InstanceHome:
    """One instance, seen from its home. Used from the worker's event loop.

    Args:
        placement: where everything lies now.
        remote: the way to layers elsewhere.
        heads: the way to heads elsewhere.
        timeout_s: a question that is not answered by then has failed.
        on_lost: told of a host whose KV of this instance is not to be relied on any more, with the reason. No step
            begins until somebody has repaired that.
    """

    def __init__(
        self,
        thread: EngineThread,
        calls: LinkCalls,
        remote: RemoteStages,
        heads: RemoteHeads,
        placement: Placement,
        timeout_s: float,
        on_lost: Callable[[str, str], None],
    ) -> None:
        self.placement = placement
        """Set in the engine's thread, in the call that makes it true there."""
        self.remote = remote
        self.heads = heads
        self.lock = asyncio.Lock()
        """Held while something moves: one thing at a time."""
        self.under_way: str | None = None
        """What that is, for people."""
        self._thread = thread
        self._calls = calls
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._threads = ThreadPoolExecutor(COPIES_AT_A_TIME, "moves")  # they end with the process, or with this

    @property
    def hosts(self) -> list[str]:
        """Workers that have parts of the instance, home apart."""
        return sorted(self.placement.workers() - {self.placement.home})

    @property
    def grants(self) -> Grants:
        """What others have in the engine, and what is coming home."""
        return self._thread.grants

    @contextlib.asynccontextmanager
    async def busy(self, what: str) -> AsyncIterator[None]:
        """The lock, with a name for people."""
        async with self.lock:
            self.under_way = what
            try:
                yield
            finally:
                self.under_way = None

    @contextlib.asynccontextmanager
    async def steps_held(self) -> AsyncIterator[None]:
        """None is in flight, and none begins."""
        held = self._thread.hold_steps()
        try:
            await asyncio.wrap_future(held)
            yield
        finally:
            self._thread.resume_steps()

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        """Runs it in a thread of moves' own. While steps are held, those of `asyncio.to_thread` may all be taken by
        copies of exports and fetches that wait for the steps to go on (`CopyGate`): what these then wait for must not
        need one."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def engine(self, function: Callable[[Engine], T]) -> T:
        """Runs it in the engine's thread."""
        return await asyncio.wrap_future(self._thread.call(function))

    async def engine_wholly(self, function: Callable[[Engine], T]) -> T:
        """`engine`, for what is not to be left while it may be running: who is cancelled meanwhile is so after it."""
        return await to_its_end(asyncio.wrap_future(self._thread.call(function)))

    async def move_blocks(self, function: Callable[[Engine], tuple[T, Mapping[int, int]]]) -> T:
        """Runs `function` in the engine's thread, which gives own blocks other places and says which, and has all hosts
        follow. While steps are held. Who is cancelled meanwhile is so after it: a host that is not told goes on with
        the old places, which are others' then. Raises QuestionFailedError as `follow_moved_blocks`."""

        async def both() -> T:
            result, moves = await self.engine(function)
            await self.follow_moved_blocks(moves)
            return result

        return await to_its_end(asyncio.ensure_future(both()))

    async def switch(self, after: Placement, function: Callable[[Engine], None]) -> None:
        """The instance lies as `after` says from now on; `function` makes it so in the engine. While steps are held."""

        def use(engine: Engine) -> None:
            function(engine)
            self.placement = after

        await self.engine_wholly(use)

    async def ask(self, peer: str, kind: Kind, meta: bytes, tensors: Tensors = ()) -> Answer:
        """Raises QuestionFailedError."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()

        def done(answer: Answer) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if answered.done() else answered.set_result(answer))

        version, until_s = self.placement.version, time.monotonic() + self._timeout_s
        self._calls.call(peer, kind, version, meta, tensors, done, until_s)
        answer = await answered
        if answer.error is not None:
            raise QuestionFailedError(f"{peer!r} was asked for {kind.name}: {answer.error}")
        return answer

    async def give_back(self, host: str, lanes: Sequence[Lane], layers: Sequence[int]) -> None:
        """What a host has and is no longer to have. One that cannot be told has lost it, or will when its link ends."""
        with contextlib.suppress(QuestionFailedError):
            await self.ask(host, Kind.RELEASE, encode(lanes=list(lanes), layers=list(layers)))

    async def follow_moved_blocks(self, moves: Mapping[int, int]) -> None:
        """Own blocks have become others: so do those of all hosts. Before the next step, so steps are held. One that
        may not have done it is lost. Raises QuestionFailedError then, when all have been asked."""
        pending = self.hosts if moves else []
        failure: QuestionFailedError | None = None
        try:
            while pending:
                try:
                    await self.ask(pending[0], Kind.MOVE_BLOCKS, encode_moves(moves))
                except QuestionFailedError as error:
                    self.lose(pending[0], str(error))
                    failure = failure or error
                del pending[0]
        finally:
            for host in pending:  # because this was cancelled
                self.lose(host, "it may not have followed a change of blocks")
        if failure is not None:
            raise failure

    def lose(self, host: str, reason: str) -> None:
        """What the host has of the instance is not to be relied on from now on."""
        self._thread.call(lambda engine: engine.lose(host, reason))
        self._on_lost(host, reason)


async def to_its_end(work: asyncio.Future[T]) -> T:
    """What it gives. Who is cancelled meanwhile, however often, is so when it is over."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # has been looked at
        raise
