"""The thread that runs an engine's steps, and the way into it.

The engine is used by this thread alone. Others hand in functions (`call`), which run between two steps; what a step
gave goes out through a callback. With nothing to run the thread sleeps on its inbox: no polling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from actors.engine.engine import Engine, StepResult

T = TypeVar("T")

logger = logging.getLogger("ray.serve")


class EngineStoppedError(RuntimeError):
    """The engine's thread was stopped; the call was not made."""


class EngineThread:
    """Runs `engine` until `stop`. `on_turn(engine, result)` is called in the thread after each turn: the calls that
    came in, then one step if there was something to run. `on_failure()` is called should the thread end by itself."""

    def __init__(
        self, engine: Engine, on_turn: Callable[[Engine, StepResult], None], on_failure: Callable[[], None]
    ) -> None:
        self.defect: str | None = None
        """What the engine's own books said when it fell idle and they did not add up."""
        self.failure: str | None = None
        """Why the thread ended by itself: an error outside a step, after which nothing can be said of the engine."""
        self._engine = engine
        self._on_turn = on_turn
        self._on_failure = on_failure
        self._inbox: deque[tuple[Callable[[Engine], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._turn_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function(engine)` between two steps; from any thread. The future carries its result or exception."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineStoppedError("the worker is shutting down"))
                return future
            self._inbox.append((function, future))
            self._wake.notify()
        return future

    def stalled_s(self) -> float:
        """For how long the present turn has been running; 0 between turns and when idle. For health checks."""
        since_s = self._turn_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the step it is in; later calls fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._take_turns()
        except Exception as error:  # a defect: it must not look like an idle engine
            logger.exception("the engine's thread failed")
            self.failure = f"the engine's thread failed: {type(error).__name__}: {error}"
            self._on_failure()
        finally:
            with self._wake:
                self._stopping = True
                calls = list(self._inbox)
                self._inbox.clear()
            for _, future in calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStoppedError("the worker is shutting down"))

    def _take_turns(self) -> None:
        blocked = True  # by having nothing to do
        while True:
            with self._wake:
                while not self._inbox and not self._stopping and (blocked or not self._engine.has_work):
                    self._wake.wait()
                if self._stopping:
                    return
                calls = list(self._inbox)
                self._inbox.clear()
            self._turn_since_s = time.monotonic()
            for function, future in calls:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(self._engine))
                    except Exception as error:  # handed to the caller, who knows what it means
                        future.set_exception(error)
            result = self._step() if self._engine.has_work else StepResult()
            blocked = result.is_empty
            self._on_turn(self._engine, result)
            if self._engine.num_live_requests == 0:
                self._check_idle()
            self._turn_since_s = None

    def _check_idle(self) -> None:
        try:
            self._engine.check_idle()
        except RuntimeError as error:
            logger.exception("the engine's books do not add up")
            self.defect = str(error)

    def _step(self) -> StepResult:
        try:
            return self._engine.step()
        except Exception as error:  # out of memory, a kernel's refusal: the requests end, the worker lives on
            logger.exception("a step failed; its requests are ended")
            return self._engine.fail_all(f"the worker's step failed: {type(error).__name__}: {error}")
