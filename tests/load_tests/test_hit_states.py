from __future__ import annotations

import dataclasses

import pytest

from load_tests.app_counters import AppCounts, AppError, AppSizes
from load_tests.hit_states import HitState, RoundPlan, plan_rounds, why_not
from load_tests.hit_ttft import Sample, summary

PREFIX, BLOCK = 2000, 32
CACHED = 1984
"""62 whole blocks."""
BEFORE = AppCounts(fetched_tokens=500, declined_tokens=7, disk_hit_blocks=9, disk_read_extents=3, live=0)
SIZES = AppSizes(block_tokens=16, kv_bytes_per_token=1000, pool_tokens=4000, dram_bytes=20_000_000, disk_bytes=10**9)


def after(**growth: int) -> AppCounts:
    return dataclasses.replace(BEFORE, **{name: getattr(BEFORE, name) + more for name, more in growth.items()})


AS_IT_SHOULD_BE: dict[HitState, tuple[int, AppCounts]] = {
    "recompute": (0, BEFORE),
    "device hit": (CACHED, BEFORE),
    "DRAM hit": (CACHED, after(fetched_tokens=CACHED)),
    "disk hit": (CACHED, after(fetched_tokens=CACHED, disk_hit_blocks=62, disk_read_extents=3)),
}


@pytest.mark.parametrize("state", AS_IT_SHOULD_BE)
def test_each_state_is_told_from_all_others(state: HitState) -> None:
    for other, (cached, counts) in AS_IT_SHOULD_BE.items():
        reason = why_not(state, PREFIX, BLOCK, cached, BEFORE, counts)
        assert (reason is None) == (other == state), other


@pytest.mark.parametrize(
    ("state", "cached", "counts", "reason"),
    [
        ("recompute", 32, BEFORE, "32 cached tokens instead of 0"),
        ("device hit", None, BEFORE, "None cached tokens instead of 1984"),
        ("device hit", CACHED, after(fetched_tokens=64), "64 tokens fetched from the store instead of 0"),
        ("DRAM hit", CACHED, after(fetched_tokens=CACHED - 64), "1920 tokens fetched from the store instead of 1984"),
        (
            "DRAM hit",
            CACHED,
            after(fetched_tokens=CACHED, declined_tokens=1),
            "1 tokens whose fetch was declined instead of 0",
        ),
        (
            "DRAM hit",
            CACHED,
            after(fetched_tokens=CACHED, disk_hit_blocks=62, disk_read_extents=1),
            "62 blocks were on disk only, 1 extents were read",
        ),
        (
            "disk hit",
            CACHED,
            after(fetched_tokens=CACHED, disk_hit_blocks=40, disk_read_extents=2),
            "40 of 62 blocks were on disk only, 2 extents were read",
        ),
    ],
)
def test_what_is_wrong_is_said(state: HitState, cached: int | None, counts: AppCounts, reason: str) -> None:
    assert why_not(state, PREFIX, BLOCK, cached, BEFORE, counts) == reason


def test_prefixes_are_left_alone_until_enough_others_have_come() -> None:
    # Prompts of 2,000 tokens and 2 MB: the pool holds 2 of them, DRAM 10.
    assert plan_rounds(SIZES, 2000, rounds=5) == RoundPlan(dram_after=3, disk_after=15)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"pool_tokens": 1999}, "give engine.kv_cache_blocks of at least 125"),
        ({"dram_bytes": 15_999_999}, "store.dram_gib of 0.015 loses prefixes .*: give at least 0.015"),
        ({"disk_bytes": 79_999_999}, "store.disk.limit_gib of 0.075 may lose prefixes .*: give at least 0.075"),
    ],
)
def test_sizes_that_do_not_do_are_refused_with_those_that_would(changes: dict[str, int], advice: str) -> None:
    with pytest.raises(AppError, match=advice):
        plan_rounds(dataclasses.replace(SIZES, **changes), 2000, rounds=5)
    assert plan_rounds(dataclasses.replace(SIZES, dram_bytes=16_000_000, disk_bytes=80_000_000), 2000, rounds=5)


def test_only_good_samples_count_and_ratios_are_those_of_a_round() -> None:
    samples = [
        Sample(1, "recompute", 2.0, 0, None),
        Sample(1, "DRAM hit", 0.5, CACHED, None),
        Sample(2, "recompute", 9.0, 32, "32 cached tokens instead of 0"),
        Sample(2, "DRAM hit", 0.3, CACHED, None),
        Sample(3, "recompute", 4.0, 0, None),
        Sample(3, "DRAM hit", 0.4, CACHED, None),
        Sample(3, "disk hit", None, None, "no output"),
    ]
    records = {record["state"]: record for record in summary(samples)}
    assert records["recompute"]["ttft_ms"] == {"median": 3000.0, "min": 2000.0, "max": 4000.0}
    assert (records["recompute"]["samples"], records["recompute"]["thrown_away"]) == (2, 1)
    assert records["DRAM hit"]["ttft_ms"]["median"] == 400.0
    assert records["DRAM hit"]["ratio"]["pairs"] == 2
    assert records["DRAM hit"]["ratio"]["median"] == pytest.approx((0.25 + 0.1) / 2)
    assert records["disk hit"] == {
        "state": "disk hit",
        "samples": 0,
        "thrown_away": 1,
        "ttft_ms": None,
        "ratio": None,
    }
