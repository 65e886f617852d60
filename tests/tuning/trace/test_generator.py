from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.tuning.trace.random_traces import blocks_of, equal
from tuning.trace.generator import SyntheticTraffic, generate
from tuning.trace.reading import read_trace
from tuning.trace.reuse import ideal_hits
from tuning.trace.statistics import describe
from tuning.trace.trace import Trace
from tuning.trace.writing import write_trace

SMALL = SyntheticTraffic(requests=3000, turns=2.5, seed=3)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(SMALL)


def test_equal_seeds_make_equal_traces(trace: Trace) -> None:
    assert equal(generate(SMALL), trace)
    assert not equal(generate(dataclasses.replace(SMALL, seed=4)), trace)


def test_says_that_it_is_synthetic(trace: Trace) -> None:
    assert trace.name == "synthetic_seed3_blksz_16"


def test_a_turn_goes_on_from_the_full_blocks_of_the_one_before(trace: Trace) -> None:
    followers = np.flatnonzero(trace.parent_request >= 0)
    assert len(followers) > 1000
    for row in followers.tolist():
        parent = int(trace.parent_request[row])
        assert trace.turn[row] == trace.turn[parent] + 1
        assert trace.input_tokens[row] > trace.input_tokens[parent] + trace.output_tokens[parent]
        before, after = blocks_of(trace, parent), blocks_of(trace, row)
        full = int(trace.input_tokens[parent]) // 16
        assert after[:full] == before[:full]
        assert not set(after[full:]) & set(before)


def test_first_turns_share_a_prefix_and_nothing_else(trace: Trace) -> None:
    firsts = np.flatnonzero(trace.turn == 1).tolist()
    roots = {blocks_of(trace, row)[0] for row in firsts}
    assert 50 < len(roots) <= SMALL.prefixes
    uses = np.bincount(np.concatenate([blocks_of(trace, row) for row in firsts]))
    for row in firsts:
        # Shared blocks, then new ones: nothing shared comes after a new one.
        assert (np.diff(uses[blocks_of(trace, row)]) <= 0).all()


def test_rates_and_lengths_are_those_asked_for() -> None:
    asked = SyntheticTraffic(requests=20_000, requests_per_s=50, prefixes=1, prefix_tokens=1, length_sigma=0.5, turns=1)
    figures = describe(generate(asked))
    assert figures.requests == 20_000
    assert figures.requests_per_s == pytest.approx(50, rel=0.1)
    assert figures.output_tokens.p50 == pytest.approx(250, rel=0.03)
    assert figures.input_tokens.p50 == pytest.approx(201, rel=0.03)


def test_bursts_make_arrivals_uneven() -> None:
    def dispersion(burst_factor: float) -> float:
        traffic = SyntheticTraffic(requests=5000, requests_per_s=20, turns=1, burst_factor=burst_factor, burst_s=20)
        counts = np.bincount(generate(traffic).arrival_s.astype(np.int64) // 5)[:-1]
        return float(counts.var() / counts.mean())

    assert dispersion(1) == pytest.approx(1, abs=0.7)  # Poisson's
    assert dispersion(10) > 5


def test_zipf_makes_few_prefixes_hot() -> None:
    def share_of_hottest(exponent: float) -> float:
        trace = generate(SyntheticTraffic(requests=3000, turns=1, zipf_exponent=exponent))
        roots = trace.block_ids[trace.block_offsets[:-1]]
        return float(np.bincount(roots).max() / len(trace))

    assert share_of_hottest(0) < 0.03
    assert share_of_hottest(1) == pytest.approx(0.19, abs=0.03)  # one over the 100th harmonic number
    assert share_of_hottest(2) > 0.5


def test_prompts_end_at_the_longest_allowed() -> None:
    trace = generate(SyntheticTraffic(requests=2000, turns=8, max_input_tokens=1000))
    assert trace.input_tokens.max() == 1000


def test_read_back_it_is_the_same(trace: Trace, tmp_path: Path) -> None:
    write_trace(trace, tmp_path / "synthetic.jsonl.gz", "bailian")
    back, report = read_trace(tmp_path / "synthetic.jsonl.gz")
    assert report.warnings == []
    assert report.format == "bailian"
    assert ideal_hits(back) == ideal_hits(trace)
    assert equal(back, dataclasses.replace(trace, arrival_s=np.round(trace.arrival_s, 3)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("requests", 0), ("requests_per_s", 0.0), ("turns", 0.5), ("burst_share", 1.0), ("seed", -1)),
        *(("zipf_exponent", float("nan")), ("block_tokens", 0), ("think_s", float("inf"))),
    ],
)
def test_figures_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}=.* is not allowed: give "):
        dataclasses.replace(SMALL, **{name: value})
