"""The thread in which a worker attends with the heads that it has of others' instances (design decision D4).

A step of another worker asks for them once a layer and waits. In the engine's thread each of these questions would wait
for a step of this worker's own; and two workers with heads of each other would wait for one another for ever.
"""

from __future__ import annotations

import logging
import queue
import threading

from actors.engine.grants import Grants
from actors.engine.head_work import decode_head_work, encode_head_done
from actors.engine.step_messages import WorkMessageError
from migrate.links.calls import Question

logger = logging.getLogger("ray.serve")


class HeadService:
    """Answers questions for heads in the order in which they come. Its thread begins with the first one."""

    def __init__(self, grants: Grants) -> None:
        self._grants = grants
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def serve(self, question: Question) -> None:
        """Does not wait. See `LinkCalls`."""
        self._questions.put(question)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hosted heads", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after what it has been asked for so far."""
        self._questions.put(None)
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                self._answer(question)
            except Exception as error:  # the home waits for an answer, whatever it is
                logger.exception("heads that worker %s asked for failed", question.peer)
                question.refuse(f"{type(error).__name__}: {error}")

    def _answer(self, question: Question) -> None:
        hosted = self._grants.instances.get(question.peer)
        if hosted is None:
            question.refuse(f"nothing of instance {question.peer!r} is hosted here")
            return
        try:
            work = decode_head_work(question.message.meta, question.message.tensors, hosted.limits)
        except WorkMessageError as error:
            question.refuse(str(error))
            return
        question.answer(*encode_head_done(hosted.attend_checked(work)))
