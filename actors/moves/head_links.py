"""Heads of this worker's layers that other workers have, over links."""

from __future__ import annotations

import time
from collections.abc import Callable

from actors.engine.head_work import HeadDone, HeadWork, decode_head_done, encode_head_work
from actors.engine.step_messages import WorkMessageError
from actors.moves.questions import Kind
from migrate.links.calls import Answer, LinkCalls


class HeadLinks:
    """`RemoteHeads` over links.

    Args:
        timeout_s: a host that has not answered by then has failed. The step waits for it: `LinkCalls.expire` is to be
            called from another thread than the engine's.
    """

    def __init__(self, calls: LinkCalls, timeout_s: float) -> None:
        self._calls = calls
        self._timeout_s = timeout_s

    def attend(self, worker: str, work: HeadWork, done: Callable[[HeadDone], None]) -> None:
        """See `RemoteHeads`."""

        def answered(answer: Answer) -> None:
            done(_read_answer(work, answer))

        meta, tensors = encode_head_work(work)
        until_s = time.monotonic() + self._timeout_s
        self._calls.call(worker, Kind.HEADS, work.version, meta, tensors, answered, until_s)


def _read_answer(work: HeadWork, answer: Answer) -> HeadDone:
    reason = answer.error
    if reason is None:
        try:
            return decode_head_done(answer.meta, answer.tensors)
        except WorkMessageError as error:
            reason = str(error)
    return HeadDone(work.instance, work.version, work.step_id, work.layer, None, reason)
