"""The thread that runs an engine's steps, and the way into it.

The engine is used by this thread alone. Others hand in functions (`call`), which run between two turns; what a step
gave goes out through a callback. With nothing to run the thread sleeps on its inbox: no polling.

Where other workers run layers of the engine's, their answers wake it too. Until these come it begins further steps, up
to the engine's limit; each turn begins at most one step and ends at most one, in their order.

What the engine runs for others (`call_hosted`) has the end of a turn, one a turn: between two steps of the engine's own
with prompts there is at most one stage of another's, and its tokens are out before that. Decode steps leave time for
more: `HostingPace` says when the next one begins.
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
from actors.engine.grants import Grants
from actors.engine.hosting_pace import HostingPace

T = TypeVar("T")
_Call = tuple[Callable[[Engine], Any], Future[Any]]

logger = logging.getLogger("ray.serve")


class EngineStoppedError(RuntimeError):
    """The engine's thread was stopped; the call was not made."""


class EngineThread:
    """Runs `engine` until `stop`. `on_turn(engine, result)` is called in the thread after each turn: the calls that
    came in, then a step if there was something to run; the result is that of the step that ended, if any did.
    `on_failure()` is called should the thread end by itself."""

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
        self._inbox: deque[_Call] = deque()
        self._drained_inbox: deque[_Call] = deque()
        self._hosted_inbox: deque[_Call] = deque()
        self._wake = threading.Condition()
        self._num_holds = 0
        self._stopping = False
        self._turn_since_s: float | None = None
        self._pace = HostingPace(engine.config.hosting_pause)
        engine.on_news = self._notify
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def grants(self) -> Grants:
        """What others have in the engine: hosted heads are attended with in another thread, under its lock."""
        return self._engine.grants

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs `function(engine)` between two turns; from any thread. Steps may be in flight then. The future carries
        its result or exception."""
        return self._enqueue(self._inbox, function)

    def call_drained(self, function: Callable[[Engine], T]) -> Future[T]:
        """`call`, but with no step in flight: none begins before those under way have ended."""
        return self._enqueue(self._drained_inbox, function)

    def call_hosted(self, function: Callable[[Engine], T]) -> Future[T]:
        """`call`, for layers that another worker's step is to be run through: after the engine's own step, if one is to
        be run now, and one such call a turn, in their order. Calls that come later may be made before it."""
        return self._enqueue(self._hosted_inbox, function)

    def hold_steps(self) -> Future[None]:
        """No step begins from now on until `resume_steps`, while calls go on; done when none is in flight and no other
        thread copies pages, which from then on none begins to do either (see `Engine.copy_gate`). Holds add up."""
        held: Future[None] = Future()
        with self._wake:
            self._num_holds += 1

        def drained(future: Future[None]) -> None:
            if (error := future.exception()) is not None:
                held.set_exception(error)
                return
            # Not before: a step may be waiting for what is being copied.
            with self._wake:
                if self._num_holds:
                    self._engine.copy_gate.close()
            self._engine.copy_gate.when_idle(lambda: _finish(held))

        self.call_drained(lambda _: None).add_done_callback(drained)
        return held

    def resume_steps(self) -> None:
        """Ends one hold, whether it was done or not."""
        with self._wake:
            self._num_holds -= 1
            if self._num_holds == 0:
                self._engine.copy_gate.open()
            self._wake.notify()

    def _enqueue(self, inbox: deque[_Call], function: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineStoppedError("the worker is shutting down"))
                return future
            inbox.append((function, future))
            self._wake.notify()
        return future

    def _notify(self) -> None:
        """From any thread."""
        with self._wake:
            self._wake.notify()

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
                inboxes = self._inbox, self._drained_inbox, self._hosted_inbox
                calls = [call for inbox in inboxes for call in inbox]
                for inbox in inboxes:
                    inbox.clear()
            for _, future in calls:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineStoppedError("the worker is shutting down"))

    def _take_turns(self) -> None:
        blocked = True  # by having nothing to do
        engine = self._engine
        while True:
            with self._wake:
                self._sleep(blocked)
                if self._stopping:
                    return
                calls = list(self._inbox)
                self._inbox.clear()
                if engine.num_in_flight == 0:
                    calls += self._drained_inbox
                    self._drained_inbox.clear()
                is_held = self._num_holds > 0
                may_begin = not (self._drained_inbox or is_held)
            self._turn_since_s = time.monotonic()
            for call in calls:
                self._make(call)
            pauses = self._pause_s() > 0
            has_begun, result = self._run_steps(may_begin and not pauses)
            blocked = not has_begun and result.is_empty and not (is_held or pauses)
            self._on_turn(engine, result)
            self._run_hosted()
            if engine.num_live_requests == 0:
                self._check_idle()
            self._turn_since_s = None

    def _sleep(self, blocked: bool) -> None:
        """Until there is something to do. Time in which other workers had all the steps in flight is counted."""
        engine, since_s, has_slept = self._engine, time.perf_counter(), False
        while not (self._has_call or self._stopping or engine.has_news or engine.is_step_over):
            pause_s = None
            if not (blocked or self._num_holds) and engine.can_begin:
                pause_s = self._pause_s()
                if pause_s == 0:
                    break
            has_slept = True
            self._wake.wait(pause_s)
        if has_slept and engine.num_in_flight:
            engine.counters.awaited_s += time.perf_counter() - since_s

    def _pause_s(self) -> float:
        """Until the engine's next step may begin. Prompts never wait, nor does a batch that is full."""
        if not self._engine.may_gain_rows:
            return 0.0
        return self._pace.wait_s(time.perf_counter(), stage_waits=bool(self._hosted_inbox))

    def _run_hosted(self) -> None:
        with self._wake:
            hosted = self._hosted_inbox.popleft() if self._hosted_inbox else None
        if hosted is not None:
            began_s = time.perf_counter()
            self._make(hosted)
            self._pace.hosted(began_s, time.perf_counter())

    def _make(self, call: _Call) -> None:
        function, future = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(self._engine))
            except Exception as error:  # handed to the caller, who knows what it means
                future.set_exception(error)

    @property
    def _has_call(self) -> bool:
        if self._inbox or self._hosted_inbox:
            return True
        return bool(self._drained_inbox and self._engine.num_in_flight == 0)

    def _check_idle(self) -> None:
        try:
            self._engine.check_idle()
        except RuntimeError as error:
            logger.exception("the engine's books do not add up")
            self.defect = str(error)

    def _run_steps(self, may_begin: bool) -> tuple[bool, StepResult]:
        """Takes in what other workers have answered, begins a step if none can be ended, and ends one that is over.
        Whether one has begun, and what the other gave."""
        engine, has_begun, began_s = self._engine, False, time.perf_counter()
        try:
            engine.advance()
            if may_begin and engine.can_begin and not engine.is_step_over:
                has_begun = engine.begin_step()
            if not engine.is_step_over:
                return has_begun, StepResult(fetches=engine.take_fetches())
            result = engine.end_step()
            self._pace.stepped(began_s, time.perf_counter(), has_prompts=result.prefill_tokens > 0)
            return has_begun, result
        except Exception as error:  # out of memory, a kernel's refusal: the requests end, the worker lives on
            logger.exception("a step failed; its requests are ended")
            return False, engine.fail_all(f"the worker's step failed: {type(error).__name__}: {error}")


def _finish(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():  # else whoever waited for it has given up
        future.set_result(None)
