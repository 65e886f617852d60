from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from tests.tuning.trace.random_traces import traces
from tuning.trace.plots import html_page
from tuning.trace.reading import read_trace
from tuning.trace.statistics import describe, text_lines
from tuning.trace.trace import Trace

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "traces"


@pytest.fixture
def trace() -> Trace:
    """Blocks of 4 tokens: [A B c], c being partial; [A B D] two seconds later, and again after two minutes more."""
    return Trace(
        name="three <prompts>",
        arrival_s=np.array([0.0, 2.0, 122.0]),
        input_tokens=np.array([10, 12, 12]),
        output_tokens=np.array([1, 2, 6]),
        block_tokens=4,
        block_offsets=np.array([0, 3, 6, 9]),
        block_ids=np.array([0, 1, 2, 0, 1, 3, 0, 1, 3]),
        parent_request=np.array([-1, 0, -1]),
        turn=np.array([1, 2, 1], dtype=np.int32),
    )


def test_figures_computed_by_hand(trace: Trace) -> None:
    figures = describe(trace)
    assert figures.requests == 3
    assert figures.span_s == 122.0
    assert figures.requests_per_s == pytest.approx(3 / 122)
    assert figures.follow_up_requests == 1
    assert figures.distinct_arrival_times == 3
    assert (figures.input_tokens.mean, figures.input_tokens.p50) == (pytest.approx(34 / 3), 12)
    assert (figures.output_tokens.least, figures.output_tokens.most) == (1, 6)
    assert figures.rates.interval_s == 2
    assert figures.rates.requests_per_s == [0.5, 0.5, *[0.0] * 59, 0.5]
    assert figures.rates.input_tokens_per_s[1] == 6.0
    reuse = figures.reuse
    assert reuse is not None
    assert (reuse.blocks, reuse.different_blocks, reuse.different_blocks_used_again) == (9, 4, 3)
    assert reuse.ideal_hit_ratio == pytest.approx(5 / 9)
    assert reuse.ideal_hit_tokens_ratio == pytest.approx(20 / 34)
    # Five intervals: 2, 2, 120, 120, 120 seconds.
    assert reuse.reuse_interval_s["p50"] == 120.0
    assert reuse.reuse_interval_s["max"] == 120.0
    assert [(tree.root, tree.requests, tree.blocks, tree.hits) for tree in reuse.hottest_subtrees] == [
        (0, 3, 4, 5),
        (3, 2, 1, 1),
    ]
    assert reuse.working_set.blocks_by_window_s["60"][0] == 3
    assert reuse.working_set.blocks_by_window_s["60"][50] == 4
    assert reuse.working_set.blocks_by_window_s["60"][60] == 3
    assert reuse.working_set.blocks_by_window_s["60"][-2] == 0
    assert reuse.working_set.blocks_by_window_s["all"][-1] == 4


def test_without_hashes_nothing_is_said_of_hits() -> None:
    trace, _ = read_trace(FIXTURES / "azure_llm_2023_conv_head.csv")
    figures = describe(trace)
    assert figures.reuse is None
    text = "\n".join(text_lines(figures))
    assert "no reuse information" in text
    assert "hit ratio" not in text
    assert "no reuse information" in html_page(trace, figures)


@settings(deadline=None)
@given(traces())
def test_any_trace_can_be_described(trace: Trace) -> None:
    figures = describe(trace)
    assert json.loads(json.dumps(figures.as_json(), allow_nan=False))["requests"] == len(trace)
    assert sum(figures.rates.requests_per_s) * figures.rates.interval_s == pytest.approx(len(trace))
    assert all("nan" not in line for line in text_lines(figures))


def test_the_page_needs_nothing_else(trace: Trace) -> None:
    page = html_page(trace, describe(trace))
    assert "<h1>Trace three &lt;prompts&gt;</h1>" in page
    assert "three <prompts>" not in page
    # The script itself, once, and not the address of one.
    assert page.count("plotly.js v") == 1
    assert "<script src" not in page
    assert "<link" not in page.split("<body>")[0]
    for heading in ("Arrivals", "Lengths", "Reuse intervals", "Working set", "Hottest subtrees"):
        assert f"<h2>{heading}</h2>" in page
