"""When one sequence got where, and whose it is, as the ingress sees it: for its metrics and its trace."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from app.api_keys import PUBLIC


@dataclass(slots=True)
class SequenceTimes:
    """In seconds of `time.perf_counter`; None: it did not get there. What happens again, after a worker was lost, keeps
    its first time, but for the last token."""

    arrived_s: float = field(default_factory=time.perf_counter)
    """Its request had been read."""
    priority: int = 0
    """Its request's."""
    key: str = PUBLIC.name
    """The name of its request's API key."""
    admitted_s: float | None = None
    first_token_s: float | None = None
    taken_over_s: float | None = None
    """The first token of a decode worker that it was handed over to."""
    last_token_s: float | None = None

    def admitted(self) -> None:
        """It may go to its workers now."""
        if self.admitted_s is None:
            self.admitted_s = time.perf_counter()

    def taken_over(self) -> None:
        """A token of its decode worker has come."""
        if self.taken_over_s is None:
            self.taken_over_s = time.perf_counter()
