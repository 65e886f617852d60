"""Layers that other workers run for this one's instance, over links (design decision D4)."""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.engine.stage_work import StageDone, StageWork, decode_done, encode_work
from actors.engine.step_messages import WorkMessageError
from actors.moves.questions import Kind
from migrate.links.calls import Answer, LinkCalls


class StageLinks:
    """`RemoteStages` over links.

    Args:
        timeout_s: a host that has not answered by then has failed.
    """

    def __init__(self, calls: LinkCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s

    def submit(self, worker: str, work: StageWork, done: Callable[[StageDone], None]) -> None:
        """See `RemoteStages`."""

        def answered(answer: Answer) -> None:
            done(_read_answer(work, answer))

        meta, tensors = encode_work(work)
        until_s = time.monotonic() + self._timeout_s
        self._calls.call(worker, Kind.STAGE, work.version, meta, tensors, answered, until_s)


def _read_answer(work: StageWork, answer: Answer) -> StageDone:
    reason = answer.error
    if reason is None:
        try:
            return decode_done(answer.meta, answer.tensors)
        except WorkMessageError as error:
            reason = str(error)
    return StageDone(work.instance, work.version, work.step_id, None, reason)
