"""A worker's surface in one event loop, for situations that a real actor cannot be brought into on purpose: its calls
hang, fail or die when the test says so. Messages go through the worker's own `Outbox`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.addresses import WorkerAddress
from actors.direct_line import LineServer
from actors.engine.request import TokenEvent
from actors.messages import LineAddress, Submission, WorkerFacts, WorkerMessage
from actors.outbox import Outbox
from kv.layout import KvLayout
from migrate.load import Role, WorkerLoad
from migrate.roster import Member

BLOCK_TOKENS = 16
BLOCKS = 100


class _Method:
    """A method as an actor's handle has it: the call is made at once, the answer can be awaited."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._function(*arguments))


class PlainWorker:
    """Takes requests and does nothing with them; `give` is what it answers."""

    def __init__(self, worker_id: str = "w", role: Role = "monolithic", *, is_busy: bool = False) -> None:
        self.worker_id = worker_id
        self.role: Role = role
        self.outbox = Outbox()
        self.steps = 0
        self.is_busy = is_busy
        self.submitted: list[Submission] = []
        self.aborted: list[str] = []
        self.answers_submit = asyncio.Event()
        """Cleared: `submit` takes the request and does not return."""
        self.answers_submit.set()
        self.fails_submit: Exception | None = None
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lines = LineServer(self._collect)
        self.line_address: LineAddress | None = None
        """Set by `wait_for_lines`, or to one where it does not wait."""
        self.submit, self.abort, self.collect = map(_Method, (self._submit, self._abort, self._collect))

    async def wait_for_lines(self) -> None:
        """Its members can be asked over a socket from now on."""
        self.line_address = await self.lines.start("127.0.0.1")

    def member(self) -> Member:
        layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_tokens=BLOCK_TOKENS, dtype="float32")
        facts = WorkerFacts(layout, b"", BLOCKS * BLOCK_TOKENS, BLOCKS, 260, (), "torch", "cpu", self.line_address)
        return Member(
            self.worker_id, 0, self.role, "node", b"", BLOCK_TOKENS, BLOCKS, BLOCKS * BLOCK_TOKENS,
            WorkerAddress(self, facts),
        )  # fmt: skip

    def give(self, token_id: int | None, finish_reason: str | None = None, number: int = -1, **more: Any) -> None:
        """An event of the request that came as the `number`th."""
        request = self.submitted[number].request
        self.outbox.deliver([TokenEvent(request.request_id, token_id, finish_reason, request.owner, **more)])

    def die(self, error: Exception) -> None:
        """Every call fails from now on, those that are open included."""
        self._death.set_exception(error)
        self.lines.close()

    async def _submit(self, submissions: Sequence[Submission]) -> None:
        await self._unless_dead(asyncio.sleep(0))
        if self.fails_submit is not None:
            raise self.fails_submit
        self.submitted += submissions
        await self._unless_dead(self.answers_submit.wait())

    async def _abort(self, request_ids: Sequence[str]) -> None:
        await self._unless_dead(asyncio.sleep(0))
        self.aborted += request_ids

    async def _collect(self, owner: str, timeout_s: float) -> WorkerMessage:
        message: WorkerMessage = await self._unless_dead(self.outbox.collect(owner, timeout_s))
        message.load = WorkerLoad(
            worker_id=self.worker_id,
            epoch=0,
            role=self.role,
            total_blocks=BLOCKS,
            live_blocks=0,
            running_requests=int(self.is_busy),
            waiting_requests=0,
            pending_prefill_tokens=0,
            prefill_tokens_per_s=100.0,
            steps=self.steps,
        )
        return message

    async def _unless_dead(self, answer: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(answer)
        await asyncio.wait({task, self._death}, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            task.cancel()
            self._death.result()
        return await task


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until `condition` holds."""
    while not condition():
        await asyncio.sleep(0)
