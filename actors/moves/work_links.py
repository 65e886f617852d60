"""Layers and heads that other workers run for this one's instance, over links (design decision D4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from actors.engine.head_work import HeadDone, HeadWork, decode_head_done, encode_head_work
from actors.engine.stage_work import StageDone, StageWork, decode_done, encode_work
from actors.engine.step_messages import Message, WorkMessageError
from actors.moves.questions import Kind
from migrate.links.calls import Answer, LinkCalls

T = TypeVar("T", StageDone, HeadDone)


class WorkLinks:
    """`RemoteStages` and `RemoteHeads` over links.

    Args:
        timeout_s: a host that has not answered by then has failed. A step waits for heads in the engine's thread:
            `LinkCalls.expire` is to be called from another one.
    """

    def __init__(self, calls: LinkCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s

    def submit(self, worker: str, work: StageWork, done: Callable[[StageDone], None]) -> None:
        """See `RemoteStages`."""

        def failed(reason: str) -> StageDone:
            return StageDone(work.instance, work.version, work.step_id, None, reason)

        self._ask(worker, Kind.STAGE, work.version, encode_work(work), decode_done, failed, done)

    def attend(self, worker: str, work: HeadWork, done: Callable[[HeadDone], None]) -> None:
        """See `RemoteHeads`."""

        def failed(reason: str) -> HeadDone:
            return HeadDone(work.instance, work.version, work.step_id, work.layer, None, reason)

        self._ask(worker, Kind.HEADS, work.version, encode_head_work(work), decode_head_done, failed, done)

    def _ask(
        self,
        worker: str,
        kind: Kind,
        version: int,
        message: Message,
        decode: Callable[[bytes, Sequence[torch.Tensor]], T],
        failed: Callable[[str], T],
        done: Callable[[T], None],
    ) -> None:
        def answered(answer: Answer) -> None:
            reason = answer.error
            if reason is None:
                try:
                    outcome = decode(answer.meta, answer.tensors)
                except WorkMessageError as error:
                    reason = str(error)
            done(outcome if reason is None else failed(reason))

        meta, tensors = message
        self._calls.call(worker, kind, version, meta, tensors, answered, time.monotonic() + self._timeout_s)
