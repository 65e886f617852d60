"""What each worker of a running application has done so far, by its own counters, and how evenly that is spread.

The counters are read over Ray by a process of its own, which is not there while a run is measured: a member of the
cluster would use some of the CPU that the run needs, and a load generator has no business in the cluster it loads.

    RAY_ADDRESS=127.0.0.1:6379 python -m load_tests.worker_work      the counters as one line of JSON
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kv.exit_status import status_of

_ASK_LIMIT_S = 60.0
_SHOWN_BYTES = 500


class CountersError(Exception):
    """A server's workers could not be asked; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class WorkerWork:
    """One worker's, since it started."""

    worker_id: str
    role: str
    computed_tokens: int
    """Prompt tokens run through the model."""
    fetched_tokens: int
    """Whose KV came from the store."""
    busy_s: float
    """Wall time in steps."""
    preemptions: int = 0
    """Choices that gave their blocks to others and began anew."""


async def ask_work(ray_address: str, *, with_token: bool = False) -> list[WorkerWork]:
    """Of the application in the Ray cluster at that address, on this machine.

    Args:
        with_token: the cluster asks for the token that Ray keeps in the home folder, as those of `serve run` do. What
            RAY_AUTH_MODE says goes before that.

    Raises:
        CountersError: it does not answer.
    """
    environment = {**os.environ, "RAY_ADDRESS": ray_address}
    if with_token:
        environment.setdefault("RAY_AUTH_MODE", "token")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "load_tests.worker_work",
        env=environment,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_ASK_LIMIT_S):
            out, err = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise CountersError(f"the workers' counters did not come within {_ASK_LIMIT_S:g} s") from error
    if process.returncode:
        raise CountersError(f"the workers' counters cannot be had: {err[-_SHOWN_BYTES:].decode(errors='replace')}")
    return [WorkerWork(**worker) for worker in json.loads(out.splitlines()[-1])]


def work_between(before: Sequence[WorkerWork], after: Sequence[WorkerWork]) -> list[WorkerWork]:
    """What each worker did between two readings, by worker id.

    Raises:
        CountersError: workers came or went in between, so that nobody knows what those did.
    """
    earlier = {worker.worker_id: worker for worker in before}
    if earlier.keys() != {worker.worker_id for worker in after}:
        raise CountersError("workers were replaced during the run, and their counters with them")
    done = []
    for worker in sorted(after, key=lambda worker: worker.worker_id):
        start = earlier[worker.worker_id]
        done.append(
            WorkerWork(
                worker.worker_id,
                worker.role,
                worker.computed_tokens - start.computed_tokens,
                worker.fetched_tokens - start.fetched_tokens,
                round(worker.busy_s - start.busy_s, 3),
                worker.preemptions - start.preemptions,
            )
        )
    return done


def work_figures(done: Sequence[WorkerWork]) -> dict[str, Any]:
    """What a run's row says of the workers that compute prompts: sums, and the most loaded one's share of the mean."""
    prefill = [worker for worker in done if worker.role != "decode"]
    return {
        "prefill_computed_tokens": sum(worker.computed_tokens for worker in prefill),
        "prefill_fetched_tokens": sum(worker.fetched_tokens for worker in prefill),
        "busiest_to_mean_tokens": busiest_to_mean([worker.computed_tokens for worker in prefill]),
        "busiest_to_mean_busy": busiest_to_mean([worker.busy_s for worker in prefill]),
        "work": [asdict(worker) for worker in done],
    }


def busiest_to_mean(loads: Sequence[float]) -> float | None:
    """1 where all have the same load, their number where one has all of it; None where none has any."""
    total = sum(loads)
    return round(max(loads) * len(loads) / total, 4) if total else None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 when no application answers."""
    argparse.ArgumentParser(
        prog="python -m load_tests.worker_work",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    # Here, not above: whoever asks needs no Ray.
    import ray

    from actors.addresses import address_of
    from load_tests.app_counters import AppError, find_app

    try:
        _, view = find_app()
    except AppError as error:
        print(error, file=sys.stderr)
        return 1
    stats = ray.get([address_of(member).actor.stats.remote() for member in view.members], timeout=_ASK_LIMIT_S)
    work = [
        WorkerWork(
            member.worker_id,
            member.role,
            counters["computed_prompt_tokens"],
            counters["fetched_tokens"],
            counters["busy_s"],
            counters["preemptions"],
        )
        for member, counters in zip(view.members, stats, strict=True)
    ]
    print(json.dumps([asdict(worker) for worker in work]))
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
