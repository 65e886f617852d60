"""How much one API key may ask for: requests a minute, requests at a time, and how soon its turn is.

Each ingress replica counts by itself, so with n replicas a key may get up to n times as much. The rate is that of a
token bucket that holds ten seconds' worth, and one request at least (ours).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from app.openai_errors import invalid_request, over_key_limit

MAX_PRIORITY = 100
"""The largest priority, and less 0 the smallest, so that there is an end to how long one can be overtaken."""
_BURST_S = 10.0


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: no limit."""

    requests_per_min: float | None = None
    max_inflight: int | None = None
    priority: int = 0
    """The smallest that its requests may ask for, and what they have when they ask for none."""

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request that asks for one, or (None) for none. Raises ApiError 400 for one that would go
        before what the key may have: nobody gets ahead by asking."""
        if asked is None:
            return self.priority
        if asked < self.priority:
            raise invalid_request(
                f"Invalid value for 'priority': {asked}. With this key it must be {self.priority} or more; less would "
                "be sooner.",
                param="priority",
            )
        return asked


NO_LIMITS = KeyLimits()


@dataclass(slots=True)
class _Use:
    num_inflight: int = 0
    tokens: float = math.inf
    """Requests that may begin at once; infinite before the first one, which fills the bucket."""
    filled_s: float = 0.0


class KeyUse:
    """What the keys have in use. Used from one event loop."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    @contextmanager
    def hold(self, name: str, limits: KeyLimits, now_s: float) -> Iterator[None]:
        """One request of the key `name`, from here to the end of the block.

        Raises:
            ApiError: 429, with the time after which to come again, when it would be one too many.
        """
        use = self._uses.setdefault(name, _Use())
        if limits.max_inflight is not None and use.num_inflight >= limits.max_inflight:
            raise over_key_limit(f"this key may have {limits.max_inflight} requests at a time", retry_after_s=1.0)
        if limits.requests_per_min is not None:
            self._take(use, limits.requests_per_min, now_s)
        use.num_inflight += 1
        try:
            yield
        finally:
            use.num_inflight -= 1

    @staticmethod
    def _take(use: _Use, per_min: float, now_s: float) -> None:
        per_s = per_min / 60
        capacity = max(1.0, per_s * _BURST_S)
        use.tokens = min(capacity, use.tokens + (now_s - use.filled_s) * per_s)
        use.filled_s = now_s
        if use.tokens < 1:
            raise over_key_limit(
                f"this key may send {per_min:g} requests a minute", retry_after_s=(1 - use.tokens) / per_s
            )
        use.tokens -= 1
