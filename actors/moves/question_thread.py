"""A thread that answers questions of other workers beside the engine's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from migrate.links.calls import Question

logger = logging.getLogger("ray.serve")


class QuestionThread:
    """Answers in the order in which questions come; begins with the first one.

    Args:
        answer: answers or refuses a question. What it raises is a refusal, and a defect.
    """

    def __init__(self, name: str, answer: Callable[[Question], None]) -> None:
        self._name = name
        self._answer = answer
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def serve(self, question: Question) -> None:
        """Does not wait. See `LinkCalls`."""
        self._questions.put(question)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after what it has been asked so far."""
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
                logger.exception("a question of worker %s failed", question.peer)
                question.refuse(f"{type(error).__name__}: {error}")
