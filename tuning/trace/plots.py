"""The figures of a trace as one HTML file that needs neither network nor other files."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.io import to_html

from tuning.trace.reuse import gaps_s
from tuning.trace.statistics import NO_REUSE, Reuse, TraceStatistics, text_lines
from tuning.trace.trace import Trace

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
pre {{ background: #f4f4f4; padding: 1rem; overflow-x: auto; }}
h2 {{ margin: 2.5rem 0 0.3rem; }}
p {{ margin: 0 0 0.5rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<pre>{text}</pre>
{plots}
</body>
</html>
"""
_NUM_POINTS: Final = 200


def html_page(trace: Trace, statistics: TraceStatistics) -> str:
    """The page for a trace and its `describe`."""
    sections = []
    for number, (heading, remark, figure) in enumerate(_figures(trace, statistics)):
        figure.update_layout(template="plotly_white", height=380, margin={"t": 20, "r": 20})
        # The script is four megabytes: once is enough.
        plot = to_html(figure, full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        sections.append(f"<h2>{escape(heading)}</h2>\n<p>{escape(remark)}</p>\n{plot}")
    if statistics.reuse is None:
        sections.append(f"<h2>Reuse</h2>\n<p>{escape(NO_REUSE)}.</p>")
    title = escape(f"Trace {statistics.name}")
    return _PAGE.format(title=title, text=escape("\n".join(text_lines(statistics))), plots="\n".join(sections))


def _figures(trace: Trace, statistics: TraceStatistics) -> Iterator[tuple[str, str, Any]]:
    """Heading, remark and figure of each section."""
    rates = statistics.rates
    minutes = [index * rates.interval_s / 60 for index in range(len(rates.requests_per_s))]
    figure = go.Figure()
    figure.add_scatter(x=minutes, y=rates.requests_per_s, name="requests/s", line={"shape": "hv"})
    figure.add_scatter(
        x=minutes, y=rates.input_tokens_per_s, name="prompt tokens/s", yaxis="y2", line={"shape": "hv", "dash": "dot"}
    )
    second = {"title": "prompt tokens/s", "overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False}
    figure.update_layout(xaxis_title="minutes", yaxis={"title": "requests/s", "rangemode": "tozero"}, yaxis2=second)
    yield "Arrivals", f"Means over {rates.interval_s:g} s; the last interval need not be full.", figure

    figure = go.Figure()
    for name, tokens in (("prompt", trace.input_tokens), ("answer", trace.output_tokens)):
        at, share = _cumulative(tokens.astype(np.float64))
        figure.add_scatter(x=at, y=share, name=name)
    figure.update_layout(xaxis={"title": "tokens", "type": "log"}, yaxis_title="share of requests at most as long")
    yield "Lengths", "Answers of length 0 are not shown on this scale.", figure

    if statistics.reuse is not None:
        yield from _reuse_figures(trace, statistics.reuse)


def _reuse_figures(trace: Trace, reuse: Reuse) -> Iterator[tuple[str, str, Any]]:
    gaps = gaps_s(trace)
    intervals = gaps[np.isfinite(gaps)]
    if len(intervals):
        at, share = _cumulative(intervals)
        figure = go.Figure(go.Scatter(x=at, y=share * len(intervals) / len(gaps)))
        figure.update_layout(
            xaxis={"title": "seconds since the block's last use", "type": "log"}, yaxis_title="share of all blocks"
        )
        yield (
            "Reuse intervals",
            "Share of all blocks that hit when nothing is kept longer than this; it ends at the ideal hit ratio.",
            figure,
        )

    figure = go.Figure()
    minutes = [at_s / 60 for at_s in reuse.working_set.at_s]
    for window, blocks in reuse.working_set.blocks_by_window_s.items():
        figure.add_scatter(
            x=minutes, y=blocks, name="all so far" if window == "all" else f"last {float(window):,.0f} s"
        )
    figure.update_layout(xaxis_title="minutes", yaxis={"title": "different blocks", "rangemode": "tozero"})
    yield "Working set", f"Different blocks of {reuse.block_tokens:,} tokens used within a window.", figure

    trees = reuse.hottest_subtrees
    if trees:
        names = [f"block {tree.root} (depth {tree.depth_blocks})" for tree in trees]
        figure = go.Figure(go.Bar(x=[tree.hits for tree in trees], y=names, orientation="h"))
        figure.update_layout(xaxis={"title": "hits", "type": "log"}, yaxis={"autorange": "reversed"})
        yield "Hottest subtrees", "Hits on all blocks below a prefix; subtrees may lie in one another.", figure


def _cumulative(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of the distribution: values, and the share that is at most as high."""
    share = np.linspace(0, 1, _NUM_POINTS + 1)
    return np.quantile(values, share, method="inverted_cdf"), share
