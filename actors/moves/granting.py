"""Grants at a worker whose own layers or heads may lie elsewhere.

A grant makes room by moving own blocks, and those of lanes elsewhere have to follow before the next step. So where some
are, no step is in flight when a grant is made, since its blocks could not be moved, and none begins before
all hosts have followed. Workers may host for each other in a cycle: each goes on answering its peers' questions while
its own steps are held.
"""

from __future__ import annotations

import asyncio
import logging

from actors.engine.room import GrantRefusedError
from actors.engine_thread import EngineStoppedError
from actors.moves.host import MoveHost, grant, grant_reply
from actors.moves.instance_home import InstanceHome, QuestionFailedError
from actors.moves.questions import Kind
from migrate.links.calls import LinkCalls, Question

logger = logging.getLogger("ray.serve")


class Granting:
    """Stands before a `MoveHost`. Used from the worker's event loop."""

    def __init__(self, host: MoveHost, home: InstanceHome, calls: LinkCalls) -> None:
        self._host = host
        self._home = home
        self._calls = calls
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By peer: what is being made."""

    def serve(self, question: Question) -> None:
        """Does not wait."""
        granting = self._tasks.get(question.peer)
        if granting is not None:  # what comes after a grant, a release for instance, is about it
            granting.add_done_callback(lambda _: self.serve(question))
        elif question.message.kind == Kind.RELEASE or (self._home.placement.is_home and not self._home.lock.locked()):
            self._host.serve(question)
        elif self._home.lock.locked():
            question.refuse(f"this worker is busy with modules of its own: {self._home.under_way}")
        else:
            self._tasks[question.peer] = task = asyncio.create_task(self._make_room(question))
            task.add_done_callback(lambda _: self._tasks.pop(question.peer))

    async def _make_room(self, question: Question) -> None:
        try:
            async with self._home.busy(f"making room for {question.peer}"), self._home.steps_held():
                answer = await self._grant(question)
            question.answer(answer)
        except (GrantRefusedError, EngineStoppedError, ValueError) as error:
            question.refuse(f"{type(error).__name__}: {error}")

    async def _grant(self, question: Question) -> bytes:
        epoch = self._calls.epoch(question.peer)
        num_blocks, granted = await self._home.engine(lambda engine: grant(engine, question))
        try:
            await self._home.follow_moved_blocks({} if granted is None else granted.moved_blocks)
        except QuestionFailedError as error:  # that one is lost, and is taken care of; the grant is good
            logger.warning("a host has not followed a change of blocks: %s", error)
        if granted is not None and self._calls.epoch(question.peer) != epoch:  # nobody is there to use it
            await self._home.engine(lambda engine: engine.release(question.peer))
        return grant_reply(num_blocks, granted)
