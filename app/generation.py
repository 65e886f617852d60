"""One API request: its prompts and choices as sequences, their pieces merged, its usage counted.

Choices of one prompt share its KV: the first is sent alone, the others when its first token is there, and find the
prompt's blocks cached. Whether the request is refused for an overload is decided once, with its first sequence: the
other prompts are sent when that one was admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from actors.engine.request import EngineRequest
from app.choice_text import ChoiceText, Piece
from app.openai_responses import usage
from app.request_metrics import Ending, RequestMetrics
from app.request_spans import RequestSpans
from app.sequence_flow import SequenceFlow
from app.sequence_times import SequenceTimes
from app.tool_use import ToolUse


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of a request."""

    request: EngineRequest
    text: ChoiceText
    times: SequenceTimes = field(default_factory=SequenceTimes)


class Generation:
    """Runs the choices of one request. Iterate over `pieces` once; leaving it early frees all sequences everywhere."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Choice]],
        start: Callable[[Choice, asyncio.Event], SequenceFlow],
        metrics: RequestMetrics,
        spans: RequestSpans | None = None,
        tools: ToolUse | None = None,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`prompts`: for each prompt its choices. `start` makes a sequence; see `SequenceFlow` for its event. `tools`:
        for whoever writes the answers out; the pieces are the model's own text. `check`: awaited before the first
        sequence; raises ApiError where there is to be none."""
        self.tools = tools
        self._prompts = prompts
        self._admitted = asyncio.Event()
        self._start = start
        self._metrics = metrics
        self._spans = spans
        self._check = check
        self._cached_tokens = [0] * len(prompts)

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage`, as far as the request has come."""
        return usage(
            prompt_tokens=sum(len(choices[0].request.prompt_token_ids) for choices in self._prompts),
            completion_tokens=sum(choice.text.completion_tokens for choices in self._prompts for choice in choices),
            cached_tokens=sum(self._cached_tokens),
        )

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Pieces of all choices as they come; each choice ends with one that has a finish reason.

        Raises what `SequenceFlow.events` raises, for the first choice that fails, and the others are then freed; or
        what `check` raises.
        """
        if self._check is not None:
            await self._check()
        if len(self._prompts) == 1 and len(self._prompts[0]) == 1:
            async with aclosing(self._run(0, self._prompts[0][0])) as pieces:
                async for piece in pieces:
                    yield piece
            return
        merged: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._run_prompt(index, choices, merged)) for index, choices in enumerate(self._prompts)
        ]
        try:
            left = sum(map(len, self._prompts))
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_prompt(
        self, index: int, choices: Sequence[Choice], merged: asyncio.Queue[Piece | Exception]
    ) -> None:
        """Runs one prompt's choices; what goes wrong is put in the queue for whoever reads it."""
        started = asyncio.Event()

        async def forward(choice: Choice) -> None:
            if choice is not choices[0]:
                await started.wait()
            elif index:
                await self._admitted.wait()
            async with aclosing(self._run(index, choice)) as pieces:
                async for piece in pieces:
                    started.set()
                    merged.put_nowait(piece)

        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(forward(choice))
        except* Exception as errors:
            merged.put_nowait(_first_of(errors))

    async def _run(self, prompt_index: int, choice: Choice) -> AsyncGenerator[Piece]:
        async with aclosing(self._start(choice, self._admitted).events()) as events:
            async for event in events:
                if event.cached_tokens is not None and choice is self._prompts[prompt_index][0]:
                    self._cached_tokens[prompt_index] = event.cached_tokens
                    self._metrics.prompt(len(choice.request.prompt_token_ids), choice.times)
                if event.token_id is not None:
                    self._metrics.token(choice.times)
                piece = choice.text.take(event)
                if piece.finish_reason is not None:
                    self._ended(choice, piece.finish_reason)
                yield piece
                if choice.text.ended:
                    return

    def give_up(self, reason: Ending) -> None:
        """To be called once when nobody reads `pieces` any more: counts the choices that have not ended."""
        for choice in (choice for choices in self._prompts for choice in choices):
            if not choice.text.ended:
                self._ended(choice, reason)

    def _ended(self, choice: Choice, reason: Ending) -> None:
        self._metrics.ended(choice.times, reason)
        if self._spans is not None:
            request = choice.request
            prompt_tokens, answer_tokens = len(request.prompt_token_ids), choice.text.completion_tokens
            self._spans.ended(request.request_id, choice.times, prompt_tokens, answer_tokens, reason)


def _first_of(errors: ExceptionGroup[Exception]) -> Exception:
    first = errors.exceptions[0]
    return _first_of(first) if isinstance(first, ExceptionGroup) else first
