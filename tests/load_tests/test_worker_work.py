from __future__ import annotations

import asyncio

import pytest

from load_tests.worker_work import CountersError, WorkerWork, ask_work, busiest_to_mean, work_between, work_figures

BEFORE = [
    WorkerWork("p1", "prefill", 1000, 50, 2.0),
    WorkerWork("p2", "prefill", 0, 0, 0.5),
    WorkerWork("d", "decode", 0, 900, 7.0, 1),
]
AFTER = [
    WorkerWork("d", "decode", 10, 1900, 9.0, 4),
    WorkerWork("p2", "prefill", 300, 600, 1.5),
    WorkerWork("p1", "prefill", 1100, 50, 5.0),
]


def test_work_is_what_was_done_between_two_readings() -> None:
    assert work_between(BEFORE, AFTER) == [
        WorkerWork("d", "decode", 10, 1000, 2.0, 3),
        WorkerWork("p1", "prefill", 100, 0, 3.0),
        WorkerWork("p2", "prefill", 300, 600, 1.0),
    ]
    with pytest.raises(CountersError, match="replaced"):
        work_between(BEFORE, AFTER[:2])
    with pytest.raises(CountersError, match="replaced"):
        work_between(BEFORE[:2], AFTER)


def test_figures_are_of_the_workers_that_compute_prompts() -> None:
    figures = work_figures(work_between(BEFORE, AFTER))
    work = figures.pop("work")
    assert [worker["worker_id"] for worker in work] == ["d", "p1", "p2"]
    assert figures == {
        "prefill_computed_tokens": 400,
        "prefill_fetched_tokens": 600,
        "busiest_to_mean_tokens": 1.5,  # 300 of 200 on average
        "busiest_to_mean_busy": 1.5,  # 3 s of 2 s on average
    }


@pytest.mark.parametrize(
    ("loads", "ratio"), [([], None), ([0, 0], None), ([7], 1.0), ([5, 5, 5], 1.0), ([9, 0, 0], 3.0), ([1, 3], 1.5)]
)
def test_the_busiest_beside_the_mean(loads: list[float], ratio: float | None) -> None:
    assert busiest_to_mean(loads) == ratio


def test_a_cluster_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CountersError, match="cannot be had"):
        asyncio.run(ask_work("nonsense"))
