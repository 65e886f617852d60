"""Evaluations in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from tuning.pareto.evaluation import Evaluate, Evaluation
from tuning.pareto.space import Point

_installed: list[Evaluate] = []


@contextmanager
def local_pool(evaluate: Evaluate, workers: int) -> Iterator[tuple[Executor, Evaluate]]:
    """An executor with so many processes, and what to submit to it in the place of `evaluate`.

    `evaluate`, with the trace in it, goes to each process once and not with each point. The processes end with the
    block, and also when this process is killed.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_install, initargs=(evaluate,))
    try:
        yield pool, _evaluate_installed
    finally:
        pool.shutdown(cancel_futures=True)


def _install(evaluate: Evaluate) -> None:
    _installed[:] = [evaluate]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Nobody tells a worker that the pool's process was killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _evaluate_installed(point: Point) -> Evaluation:
    return _installed[0](point)
