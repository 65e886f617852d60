from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.trace.random_traces import traces
from tests.tuning.ttl.path_traces import path_trace
from tuning.trace.reading import read_trace
from tuning.trace.trace import Trace
from tuning.ttl.comparison import on_the_same_trace, on_the_second_half
from tuning.ttl.fit import FitOptions, fit


def skewed_trace() -> Trace:
    """One prefix that comes back every 40 s among prompts that never do, one a second."""
    return path_trace(*[(float(time), "pppppppp" if time % 40 == 0 else 4 * chr(1000 + time)) for time in range(400)])


def test_group_ttls_gain_where_one_prefix_comes_back() -> None:
    trace = skewed_trace()
    # The prefix takes 8 blocks all the time. A TTL of 40 s for all would take 4 * 40 more.
    fitted = fit(trace, 20 * 399.0, FitOptions())
    assert fitted.roots == (0,)
    assert fitted.plan.ttls_s == (0, 40)
    found = on_the_same_trace(fitted)
    hits = 9 * 8 / len(trace.block_ids)
    assert (found.lru, found.uniform_ttl, found.group_ttl, found.group_ttl_in_pool) == (0, 0, hits, hits)
    assert (found.pool_blocks, found.group_held.peak_blocks, found.gain) == (20, 12, 0)
    later = on_the_second_half(trace, 20 * 399.0, FitOptions())
    assert later is not None
    assert later.group_ttl == 5 * 8 / (len(trace.block_ids) - int(trace.block_offsets[200]))
    assert later.uniform_ttl == 0


def test_group_ttls_gain_nothing_where_all_prefixes_are_alike() -> None:
    letters = "abcdefghij"
    trace = path_trace(*[(float(time), letters[time % 10] * 4) for time in range(200)])
    for blocks in (10, 30, 41):
        found = on_the_same_trace(fit(trace, blocks * 199.0, FitOptions(coverage=1)))
        if blocks == 41:
            assert found.uniform_ttl == found.group_ttl == found.lru == 1 - 40 / 800
        else:  # who keeps some for as long as it takes has their hits; who treats all alike has none
            assert found.uniform_ttl == found.lru == 0
            assert found.group_ttl > 0


def test_hindsight_is_told_from_foresight() -> None:
    """Each prefix comes back for a while and then never more: the first half teaches nothing for the second."""
    trace = path_trace(*[(float(time), f"{chr(97 + time // 40)}{time % 4}" * 2) for time in range(400)])
    budget_block_s = 8 * 399.0
    same = on_the_same_trace(fit(trace, budget_block_s, FitOptions()))
    later = on_the_second_half(trace, budget_block_s, FitOptions())
    assert later is not None
    assert same.gain >= 0
    assert later.gain <= 0


def test_there_is_no_later_half_without_time_or_uses() -> None:
    options = FitOptions(partial_blocks="miss")
    assert on_the_second_half(path_trace((0, "a")), 5, options) is None
    assert on_the_second_half(path_trace((0, "a"), (1, "a")), 5, options) is None
    assert on_the_second_half(path_trace((0, "a"), (1, "a"), (2, "a"), (3, "b"), partial=(2, 3)), 5, options) is None


@given(traces(), st.floats(0, 300), st.integers(0, 4))
@settings(deadline=None, max_examples=60)
def test_within_an_equal_budget_groups_never_promise_less(trace: Trace, budget_block_s: float, max_groups: int) -> None:
    fitted = fit(trace, budget_block_s, FitOptions(coverage=1, max_groups=max_groups))
    found = on_the_same_trace(fitted)
    assert fitted.plan.total_hits >= round(found.uniform_ttl * len(trace.block_ids))
    assert found.group_held.mean_blocks * fitted.uses.horizon_s <= budget_block_s + 1e-6
    assert found.uniform_held.mean_blocks * fitted.uses.horizon_s <= budget_block_s + 1e-6


def test_without_limit_everything_is_hit() -> None:
    trace = skewed_trace()
    found = on_the_same_trace(fit(trace, math.inf, FitOptions()))
    ideal = 1 - trace.num_ids / len(trace.block_ids)
    for ratio in (found.lru, found.uniform_ttl, found.group_ttl, found.group_ttl_in_pool):
        assert ratio == pytest.approx(ideal)


def test_mooncake_conversation() -> None:
    """The ideal of the public trace without limit; what LRU has in the blocks of Qwen3-8B that 1 TiB holds."""
    folder = os.environ.get("EQUIPOISE_TRACES")
    if not folder:
        pytest.skip("EQUIPOISE_TRACES does not name a folder with the public traces")
    trace, _ = read_trace(Path(folder) / "mooncake_conversation.jsonl")
    options = FitOptions(max_groups=8)
    endless = fit(trace, math.inf, options)
    assert round(on_the_same_trace(endless).group_ttl, 4) == 0.3664
    fitted = fit(trace, 14_563 * float(trace.arrival_s[-1]), options)
    assert 0 not in fitted.roots  # the block that all requests begin with
    assert np.count_nonzero(fitted.group_of_block == 0) > 150_000
    found = on_the_same_trace(fitted)
    assert found.pool_blocks == 14_563
    assert abs(found.lru - 0.2527) < 0.001  # of LRU that uses the first block first
    assert found.group_ttl > found.uniform_ttl > 0.25
