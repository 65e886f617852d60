"""Which errors of Ray and of a part mean "not there", and the word that each is counted under."""

from __future__ import annotations

from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from kv.errors import PartError, PartUnavailableError

STORE_FAILURES: tuple[type[Exception], ...] = (RayError, TimeoutError, PartError)
"""What a wait for a part or for a store, directory or worker can end in. A caller makes it a miss or a refusal."""

GONE_FOR_GOOD = (ActorDiedError, ActorUnschedulableError)
"""How a call ends whose actor will never answer again: killed on purpose, or bound to a node that is lost. Others that
have crashed are started again."""

_LABELS: tuple[tuple[type[Exception], str], ...] = (
    (ObjectStoreFullError, "object_store_full"),
    (OutOfDiskError, "out_of_disk"),
    (ObjectLostError, "object_lost"),
    (RayActorError, "actor_died"),
    (ActorUnschedulableError, "actor_died"),
    (GetTimeoutError, "timeout"),
    (PartUnavailableError, "unavailable"),
    (RayTaskError, "raised"),
    (TimeoutError, "timeout"),
)


def failure_label(error: Exception) -> str:
    """A short word for a metric label. The owner of an object having died counts as a lost object."""
    if isinstance(error, PartError):
        return f"part_{error.reason}"
    return next((label for kind, label in _LABELS if isinstance(error, kind)), "ray")
