"""Attention with the heads that a worker has of others' instances (design decision D4).

A step of another worker asks for them once a layer and waits. In the engine's thread each of these questions would wait
for a step of this worker's own; and two workers with heads of each other would wait for one another for ever. So they
have a thread that does nothing else.
"""

from __future__ import annotations

from actors.engine.grants import Grants
from actors.engine.head_work import decode_head_work, encode_head_done
from actors.engine.step_messages import WorkMessageError
from actors.moves.question_thread import QuestionThread
from migrate.links.calls import Question


def head_service(grants: Grants) -> QuestionThread:
    """The thread that answers questions for heads of the instances in `grants`."""

    def answer(question: Question) -> None:
        hosted = grants.instances.get(question.peer)
        if hosted is None:
            question.refuse(f"nothing of instance {question.peer!r} is hosted here")
            return
        try:
            work = decode_head_work(question.message.meta, question.message.tensors, hosted.limits)
        except WorkMessageError as error:
            question.refuse(str(error))
            return
        question.answer(*encode_head_done(hosted.attend_checked(work)))

    return QuestionThread("hosted heads", answer)
