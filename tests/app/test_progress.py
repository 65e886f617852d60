from __future__ import annotations

import pytest

from app.progress import Progress
from migrate.load import WorkerLoad

LONG_S = 1000.0


def report(steps: int, running: int = 0, waiting: int = 0) -> WorkerLoad:
    return WorkerLoad(
        worker_id="w",
        epoch=1,
        role="decode",
        total_blocks=8,
        live_blocks=0,
        running_requests=running,
        waiting_requests=waiting,
        pending_prefill_tokens=0,
        prefill_tokens_per_s=100.0,
        steps=steps,
    )


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (3, 4)])
def test_work_at_hand_without_a_step_counts_from_the_last_step(running: int, waiting: int) -> None:
    progress = Progress(0.0)
    progress.update(report(5, running, waiting), 10.0)
    for now_s in (11.0, 12.0, 13.0):
        progress.update(report(5, running, waiting), now_s)
        assert progress.stalled_s(now_s) == now_s - 10.0
    progress.update(report(6, running, waiting), 14.0)
    assert progress.stalled_s(15.0) == 1.0


def test_an_idle_worker_is_well() -> None:
    progress = Progress(0.0)
    for now_s in range(0, 100, 2):
        progress.update(report(5), float(now_s))
    assert progress.stalled_s(100.0) == 2.0


def test_a_worker_that_says_it_is_idle_though_requests_were_sent_to_it_is_not_believed() -> None:
    progress = Progress(0.0)
    progress.update(report(5), 10.0)
    for now_s in (12.0, 14.0):
        progress.update(report(5), now_s, has_requests=True)
    assert progress.stalled_s(14.0) == 4.0
    progress.update(report(6), 15.0, has_requests=True)
    assert progress.stalled_s(15.0) == 0.0


def test_work_that_has_just_come_to_a_long_idle_worker_is_not_a_stall() -> None:
    progress = Progress(0.0)
    progress.update(report(5, running=1), 0.0)
    progress.update(report(5), LONG_S)
    progress.update(report(5, running=1), LONG_S + 1.0)
    assert progress.stalled_s(LONG_S + 2.0) == 2.0


def test_a_restarted_engine_counts_from_zero_again() -> None:
    progress = Progress(0.0)
    progress.update(report(500, running=1), 1.0)
    progress.update(report(0, running=1), LONG_S)
    assert progress.stalled_s(LONG_S) == 0.0


def test_silence_is_no_progress() -> None:
    progress = Progress(7.0)
    assert progress.stalled_s(LONG_S) == LONG_S - 7.0  # it never reported
    progress.update(report(5), 9.0)
    assert progress.stalled_s(LONG_S) == LONG_S - 9.0
