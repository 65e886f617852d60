"""Evaluations as tasks of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import RayError, RayTaskError

T = TypeVar("T")


class ClusterError(Exception):
    """There is no cluster, it is too small, or a task was lost. The message says what to do."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connected to a cluster for as long as the block runs; a connection that is there already is used and kept.

    Raises:
        ClusterError: nothing answers there.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(f"no Ray cluster answers at {address!r} ({error}): start one, or give --local N") from error
    try:
        yield
    finally:
        ray.shutdown()


class RayExecutor(Executor):
    """`concurrent.futures` over Ray tasks. What is submitted is kept in the object store, once for each function, so it
    may be large. A task whose node dies is run again by Ray, so functions should be pure.

    Args:
        num_cpus: that each task sets aside; a fraction lets several share one.

    Raises:
        ClusterError: no task could ever run, as the cluster has fewer CPUs.
    """

    def __init__(self, num_cpus: float) -> None:
        cpus = [node["Resources"].get("CPU", 0.0) for node in _nodes() if node["Alive"]]
        self.num_slots = sum(int(each / num_cpus) for each in cpus)
        """How many tasks the cluster would run at once if it did nothing else."""
        if self.num_slots == 0:
            raise ClusterError(
                f"a task asks for {num_cpus} CPUs, and no node of the cluster has more than {max(cpus, default=0)}: "
                "give a smaller --ray-cpus"
            )
        self._task: Any = ray.remote(num_cpus=num_cpus)(_call)
        self._functions: dict[int, tuple[Callable[..., Any], ray.ObjectRef[Any]]] = {}
        self._running: dict[Future[Any], ray.ObjectRef[Any]] = {}
        self._is_shut_down = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Runs `fn` in a task. Errors of `fn` come out of the future as they are, those of the cluster as
        `ClusterError`. Raises RuntimeError after the shutdown."""
        if self._is_shut_down:
            raise RuntimeError("this executor was shut down: make another one")
        if id(fn) not in self._functions:
            self._functions[id(fn)] = (fn, ray.put(fn))
        reference = self._task.remote(self._functions[id(fn)][1], args, kwargs)
        future: Future[T] = Future()
        self._running[future] = reference
        reference.future().add_done_callback(lambda done: self._settle(future, done))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work. With `cancel_futures` tasks that have not begun are not run."""
        self._is_shut_down = True
        for future, reference in list(self._running.items()):
            if cancel_futures and future.cancel():
                ray.cancel(reference)
        if wait and (running := list(self._running.values())):
            ray.wait(running, num_returns=len(running))

    def _settle(self, future: Future[Any], done: Future[Any]) -> None:
        self._running.pop(future, None)
        if not future.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, RayTaskError):
            future.set_exception(cast(BaseException, error.cause))
        elif isinstance(error, RayError):
            future.set_exception(ClusterError(f"a task was lost ({error}): the same command goes on from there"))
        else:
            future.set_exception(error)


def _nodes() -> list[dict[str, Any]]:
    return cast(list[dict[str, Any]], ray.nodes())  # type: ignore[no-untyped-call]


def _call(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return function(*args, **kwargs)
