"""Whether a worker makes progress: pure, with time passed in. A server that answers pings and no requests is not
healthy."""

from __future__ import annotations

from migrate.load import WorkerLoad


class Progress:
    """Of one worker, from its reports: since when it neither stepped nor was idle, or was silent.

    It must see every report, not only those at hand when somebody asks: work that came a moment before the question
    would look as old as the last question.
    """

    def __init__(self, now_s: float) -> None:
        self._steps: int | None = None
        self._since_s = now_s

    def update(self, load: WorkerLoad, now_s: float, *, has_requests: bool = False) -> None:
        """Takes a report in. `has_requests`: the reader waits for tokens from this worker. A step that hangs may be the
        first one after a report of idleness, and then no report ever says that there is work."""
        idle = load.running_requests + load.waiting_requests == 0 and not has_requests
        if idle or load.steps != self._steps:
            self._since_s = now_s
        self._steps = load.steps

    def stalled_s(self, now_s: float) -> float:
        """Seconds without progress. A worker that is well reports every few seconds, so it stays at a few seconds."""
        return now_s - self._since_s
