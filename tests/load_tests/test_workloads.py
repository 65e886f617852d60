from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests.workloads import WORKLOADS, Swing, Workload, draw_priming, draw_requests, working_set

SHAPES = {  # requests, prompt tokens, output tokens
    "prefill-heavy": (40, 1024, 16),
    "decode-heavy": (64, 64, 128),
    "balanced": (48, 256, 64),
    "shared-prefix": (60, 800, 32),
    "working-set": (320, 544, 16),
    "zipf-prefixes": (480, 1056, 16),
    "one-at-a-time": (8, 64, 128),
    "short": (240, 40, 64),
    "long": (24, 1920, 64),
}


def common_prefix_length(left: Sequence[int | str], right: Sequence[int | str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


@pytest.mark.parametrize("name", SHAPES)
def test_named_workloads_have_exactly_their_lengths(name: str) -> None:
    requests = draw_requests(WORKLOADS[name], seed=3)
    count, prompt_tokens, output_tokens = SHAPES[name]
    assert len(requests) == count
    for request in requests:
        assert len(request.prompt) == request.prompt_tokens == prompt_tokens
        assert request.output_tokens == output_tokens


def test_no_other_workload_is_named() -> None:
    assert set(WORKLOADS) == {*SHAPES, "swinging"}


def test_a_swinging_load_takes_turns() -> None:
    """240 requests: 36 prompts of 1,024 tokens, 24 answers of 512, and again."""
    requests = draw_requests(WORKLOADS["swinging"], seed=3)
    shapes = [(len(request.prompt), request.prompt_tokens, request.output_tokens) for request in requests]
    assert shapes == ([(1024, 1024, 16)] * 36 + [(64, 64, 512)] * 24) * 4
    assert len({request.prompt for request in requests}) == 240


@settings(max_examples=25, deadline=None)
@given(requests=st.integers(1, 40), stretch=st.integers(1, 7), other=st.integers(1, 7))
def test_a_swinging_load_may_end_anywhere(requests: int, stretch: int, other: int) -> None:
    workload = Workload("w", requests, 3, 1, swing=Swing(stretch, Workload("o", other, 5, 2)))
    expected = [3 if number % (stretch + other) < stretch else 5 for number in range(requests)]
    assert [len(request.prompt) for request in draw_requests(workload, 1)] == expected


def test_what_is_no_swing_is_refused() -> None:
    other = Workload("o", 1, 1, 1)
    for swing in (Swing(0, other), Swing(1, Workload("o", 1, 1, 1, swing=Swing(1, other)))):
        with pytest.raises(ValueError, match="stretches of"):
            Workload("w", 1, 1, 1, swing=swing)


@settings(max_examples=25, deadline=None)
@given(seeds=st.sets(st.integers(0, 2**40), min_size=2, max_size=3), name=st.sampled_from(sorted(SHAPES)))
def test_runs_of_different_seeds_share_no_prefix(seeds: set[int], name: str) -> None:
    workload = WORKLOADS[name].scaled(0.1)
    runs = [[request.prompt for request in draw_requests(workload, seed)] for seed in sorted(seeds)]
    for run in runs:
        for other in runs:
            if run is not other:
                assert max(common_prefix_length(a, b) for a in run for b in other) < 4


def test_warm_up_shares_no_prefix_with_the_runs() -> None:
    workload = WORKLOADS["balanced"]
    warm = draw_requests(workload, "warm-up/1")
    run = draw_requests(workload, 1)
    assert max(common_prefix_length(a.prompt, b.prompt) for a in warm for b in run) < 4


def test_shared_prefix_uses_six_prefixes_equally_and_mixed() -> None:
    prompts = [request.prompt for request in draw_requests(WORKLOADS["shared-prefix"], seed=7)]
    prefixes = [prompt[:768] for prompt in prompts]
    assert sorted(Counter(prefixes).values()) == [10] * 6
    assert len({prompt[768:] for prompt in prompts}) == 60
    in_blocks = [prefix for first in dict.fromkeys(prefixes) for prefix in prefixes if prefix == first]
    assert prefixes != in_blocks


def uses_by_rank(workload: Workload, seed: int) -> list[int]:
    prompts = [request.prompt for request in draw_requests(workload, seed)]
    assert len(set(prompts)) == len(prompts)
    return sorted(Counter(prompt[: workload.prefix_tokens] for prompt in prompts).values(), reverse=True)


def test_the_working_set_is_four_pools_of_8192_tokens_by_zipf() -> None:
    workload = WORKLOADS["working-set"]
    uses = uses_by_rank(workload, seed=1)
    assert len(uses) * 512 == 4 * 8192
    assert sum(uses) == 320
    # 320 requests by 1/rank over 64 ranks: 67.5 for the first, 33.7, 22.5, ... 1.05 for the last.
    harmonic = sum(1 / rank for rank in range(1, 65))
    for rank, count in enumerate(uses, start=1):
        assert abs(count - 320 / rank / harmonic) < 1.0


def test_zipf_prefixes_has_a_favourite_and_a_long_tail() -> None:
    uses = uses_by_rank(WORKLOADS["zipf-prefixes"], seed=1)
    # 480 requests by rank ** -1.1 over 40 ranks, whose sum is 3.678: 130.5 for the first, 60.9 for the second, ... 2.3.
    assert (uses[0], uses[1], uses[-1]) in [(130, 61, 2), (131, 61, 2)]
    assert (len(uses), sum(uses)) == (40, 480)


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("scale", [0.2, 0.5, 1.0])
def test_every_prefix_of_a_working_set_is_used(zipf: float, scale: float) -> None:
    workload = working_set(1024, 2.5, prefix_tokens=100, unique_tokens=3, zipf=zipf).scaled(scale)
    assert workload.prefixes == 26
    uses = uses_by_rank(workload, seed=2)
    assert len(uses) == 26
    assert zipf > 0 or max(uses) - min(uses) <= 1


def test_priming_sends_each_prefix_once_and_nothing_else_of_the_run() -> None:
    workload = working_set(512, 4, prefix_tokens=64, unique_tokens=8)
    run = [request.prompt for request in draw_requests(workload, 3)]
    priming = [request.prompt for request in draw_priming(workload, 3)]
    assert len(priming) == 32
    assert {prompt[:64] for prompt in priming} == {prompt[:64] for prompt in run}
    assert {len(prompt) for prompt in priming} == {72}
    assert max(common_prefix_length(a, b) for a in priming for b in run) < 64 + 4
    # The most used prefix is the one that a cache has seen last.
    assert priming[-1][:64] == Counter(prompt[:64] for prompt in run).most_common(1)[0][0]


@pytest.mark.parametrize("zipf", [None, 1.1])
@pytest.mark.parametrize("requests", [1, 3, 9])
def test_priming_sends_what_a_small_part_of_a_run_uses(requests: int, zipf: float | None) -> None:
    workload = Workload("w", requests, unique_tokens=2, output_tokens=1, prefixes=7, prefix_tokens=20, zipf=zipf)
    used = {request.prompt[:20] for request in draw_requests(workload, 3)}
    assert {request.prompt[:20] for request in draw_priming(workload, 3)} == used


def test_the_law_changes_how_often_prefixes_are_used_and_not_what_they_are() -> None:
    equal = Workload("w", requests=40, unique_tokens=2, output_tokens=1, prefixes=4, prefix_tokens=6)
    skewed = Workload("w", requests=40, unique_tokens=2, output_tokens=1, prefixes=4, prefix_tokens=6, zipf=2.0)
    assert draw_priming(equal, 5) == draw_priming(skewed, 5)
    assert uses_by_rank(equal, 5) == [10] * 4
    assert uses_by_rank(skewed, 5) == [28, 7, 3, 2]


def test_unshared_prompts_of_one_run_share_no_prefix() -> None:
    prompts = [request.prompt for request in draw_requests(WORKLOADS["prefill-heavy"], seed=1)]
    longest = max(common_prefix_length(a, b) for i, a in enumerate(prompts) for b in prompts[:i])
    assert longest < 4


def test_ids_stay_in_their_range() -> None:
    requests = draw_requests(WORKLOADS["balanced"], seed=1, token_ids=range(10, 14))
    assert {token for request in requests for token in request.prompt} == {10, 11, 12, 13}


def test_the_same_seed_gives_the_same_prompts_in_another_process() -> None:
    code = (
        "from load_tests.workloads import *\n"
        "print([r.prompt for r in draw_requests(WORKLOADS['shared-prefix'].scaled(0.2), 5)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    here = [request.prompt for request in draw_requests(WORKLOADS["shared-prefix"].scaled(0.2), 5)]
    assert printed.stdout.strip() == str(here)


def test_text_prompts_are_that_many_words_and_share_whole_prefixes() -> None:
    workload = Workload("w", requests=4, unique_tokens=3, output_tokens=1, prefixes=2, prefix_tokens=5)
    requests = draw_requests(workload, 1, kind="text")
    words = [request.prompt.split() for request in requests if isinstance(request.prompt, str)]
    assert [len(prompt) for prompt in words] == [8] * 4
    assert sorted(Counter(tuple(prompt[:5]) for prompt in words).values()) == [2, 2]


@pytest.mark.parametrize(("factor", "requests"), [(0.5, 32), (0.001, 1), (2, 128)])
def test_scaling_changes_only_the_number_of_requests(factor: float, requests: int) -> None:
    workload = WORKLOADS["decode-heavy"]
    scaled = workload.scaled(factor)
    assert scaled.requests == requests
    assert (scaled.prompt_tokens, scaled.output_tokens) == (workload.prompt_tokens, workload.output_tokens)


@pytest.mark.parametrize(
    "shape",
    [
        {"requests": 0},
        {"unique_tokens": 0},
        {"output_tokens": -1},
        {"prefixes": 2},
        {"prefix_tokens": 10},
        {"prefixes": -1, "prefix_tokens": 10},
        {"zipf": 1.0},
        {"prefixes": 2, "prefix_tokens": 10, "zipf": -1.0},
        {"prefixes": 2, "prefix_tokens": 10, "zipf": float("nan")},
    ],
)
def test_impossible_shapes_are_refused(shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="workload 'w'"):
        Workload("w", **{"requests": 1, "unique_tokens": 1, "output_tokens": 1, **shape})


@pytest.mark.parametrize(("pool_tokens", "multiple"), [(0, 1.0), (100, 0.0), (100, float("inf"))])
def test_working_sets_of_nothing_are_refused(pool_tokens: int, multiple: float) -> None:
    with pytest.raises(ValueError, match="a working set of"):
        working_set(pool_tokens, multiple)


def test_scale_and_ids_are_checked() -> None:
    with pytest.raises(ValueError, match="scale is 0"):
        WORKLOADS["balanced"].scaled(0)
    with pytest.raises(ValueError, match="fewer than 2"):
        draw_requests(WORKLOADS["balanced"], 1, token_ids=range(5, 6))
