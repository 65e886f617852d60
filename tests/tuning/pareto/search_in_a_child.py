"""A search in a process of its own that is killed in the middle of an evaluation, for the tests of resuming.

`python -m tests.tuning.pareto.search_in_a_child JOURNAL CALLS KILL_AT`: every call is written to the file CALLS before
it computes; the call number KILL_AT kills the process instead (0: none does).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.tuning.pareto.small_problems import NAMES, SPACE, limited
from tuning.job.journal import open_journal
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.result import SearchResult
from tuning.pareto.search import run_search
from tuning.pareto.space import Point

BUDGET = 36


def search(journal: Path, calls: Path, kill_at: int = 0) -> SearchResult:
    lock = threading.Lock()
    num_calls = 0

    def evaluate(point: Point) -> Evaluation:
        nonlocal num_calls
        with lock:
            num_calls += 1
            if num_calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with calls.open("a") as file:
                file.write(f"{SPACE.key(point)}\n")
        return limited(point)

    with ThreadPoolExecutor(2) as executor:
        return run_search(
            "pareto",
            SPACE,
            evaluate,
            BUDGET,
            seed=1,
            objective_names=NAMES,
            constraint_names=("ttft", "cost"),
            executor=executor,
            storage=open_journal(journal),  # without the lock that a killed one has left
            study_name="cache",
        )


if __name__ == "__main__":
    search(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
