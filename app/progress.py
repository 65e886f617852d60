"""Whether a worker makes progress: pure, with time passed in. A server that answers pings and no requests is not
healthy."""

from __future__ import annotations

from migrate.load import WorkerLoad


class ProgressWatch:
    """Remembers when each worker last did a step while it had work."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._seen: dict[str, tuple[int, float]] = {}

    def update(self, load: WorkerLoad, now_s: float) -> None:
        """Takes a report in. An idle worker counts as making progress."""
        steps, _ = self._seen.get(load.worker_id, (-1, now_s))
        idle = load.running_requests + load.waiting_requests == 0
        if idle or load.steps != steps:
            self._seen[load.worker_id] = (load.steps, now_s)

    def forget(self, worker_id: str) -> None:
        """The worker left."""
        self._seen.pop(worker_id, None)

    def stalled(self, now_s: float) -> list[str]:
        """Workers that had work for the whole stall timeout and did no step in it."""
        return sorted(id_ for id_, (_, since_s) in self._seen.items() if now_s - since_s > self._stall_timeout_s)
