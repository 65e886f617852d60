from __future__ import annotations

from typing import Any, cast

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OwnerDiedError,
    RayTaskError,
    WorkerCrashedError,
)

from kv.errors import PartError, PartUnavailableError
from kv.ray_failures import STORE_FAILURES, failure_label


def raised_in_a_worker(cause: Exception) -> Exception:
    """As the caller of a remote method sees it."""
    error: Exception = cast(Any, RayTaskError)("export", "traceback", cause).as_instanceof_cause()
    return error


@pytest.mark.parametrize(
    ("error", "label"),
    [
        (PartError("checksum", "bits differ"), "part_checksum"),
        (TimeoutError(), "timeout"),
        (GetTimeoutError(), "timeout"),
        (ActorDiedError(), "actor_died"),
        (ActorUnavailableError("it is restarting", None), "actor_died"),
        (ActorUnschedulableError("its node is lost"), "actor_died"),
        (ObjectLostError("00" * 28, None, ""), "object_lost"),
        (OwnerDiedError("00" * 28, None, ""), "object_lost"),
        (ObjectStoreFullError(), "object_store_full"),
        (OutOfDiskError(), "out_of_disk"),
        (WorkerCrashedError(), "ray"),
        (raised_in_a_worker(KeyError("request")), "raised"),
        (raised_in_a_worker(ObjectStoreFullError()), "object_store_full"),
        (raised_in_a_worker(TimeoutError()), "raised"),
        (raised_in_a_worker(PartUnavailableError("too many open files")), "unavailable"),
    ],
    ids=repr,
)
def test_every_failure_is_caught_and_has_its_label(error: Exception, label: str) -> None:
    assert isinstance(error, STORE_FAILURES)
    assert failure_label(error) == label


def test_a_mistake_of_our_own_is_not_a_store_failure() -> None:
    assert not isinstance(KeyError("x"), STORE_FAILURES)
