"""What the cache does: hits by capacity, hits by tier, times-to-live by group."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

from tuning.report.content import HitCurve, JobReport, ReportedPoint, TtlPlanFacts
from tuning.report.findings import shown_point
from tuning.report.plotted import Plot, titled_axis
from tuning.report.quantities import number, percent, with_unit
from tuning.report.style import MARKS

_MOST_GROUPS = 30
_HATCHED = {"fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.6, "size": 7, "solidity": 0.2}

TIERS = (
    ("GPU memory", "hit_tokens_device", "#2f7de1", ""),
    ("DRAM", "hit_tokens_dram", "#2a9d8f", "/"),
    ("disk", "hit_tokens_disk", "#d96c00", "x"),
    ("computed", "computed_tokens", "#858d98", "."),
)
"""Where a prompt's tokens came from: title, field of `Figures`, colour, hatching."""


def hit_curve_plot(curve: HitCurve) -> Plot:
    """Hits by capacity, under what can be had at most."""
    figure = go.Figure()
    figure.add_scatter(
        x=curve.capacity_gib,
        y=curve.block_hit_ratio,
        mode="lines+markers",
        line={"color": MARKS["front"], "width": 2.5},
        marker={"size": 8},
        name="hit ratio",
        hovertext=[
            f"{with_unit(size, 'GiB')}: {percent(ratio)} of blocks"
            for size, ratio in zip(curve.capacity_gib, curve.block_hit_ratio, strict=True)
        ],
        hoverinfo="text",
        showlegend=False,
    )
    figure.add_hline(
        y=curve.ideal_block_hit_ratio,
        line={"dash": "dash", "width": 1.5, "color": MARKS["chosen"]},
        annotation={"text": f"room for everything: {percent(curve.ideal_block_hit_ratio)}", "yanchor": "bottom"},
        annotation_position="top left",
    )
    x_axis = titled_axis("capacity", "GiB", curve.capacity_gib)
    if "type" not in x_axis:
        x_axis["range"] = [0, x_axis["range"][1]]
    figure.update_layout(
        xaxis=x_axis,
        yaxis={
            "title": {"text": "share of blocks that hit"},
            "tickformat": ".0%",
            "range": [0, max(curve.ideal_block_hit_ratio, *curve.block_hit_ratio) * 1.15 or 1],
            "automargin": True,
            "zeroline": False,
        },
        margin={"t": 20, "r": 20, "b": 50, "l": 60},
    )
    ends = [
        f"{percent(curve.block_hit_ratio[place])} at {with_unit(curve.capacity_gib[place], 'GiB')}" for place in (0, -1)
    ]
    return Plot(
        "hit-curve",
        "Hit ratio against capacity",
        f"{curve.policy}. A flat stretch is memory that earns nothing; a steep one is where a little more pays.",
        f"Line from {ends[0]} to {ends[1]}; with room for everything {percent(curve.ideal_block_hit_ratio)}.",
        figure,
        380,
    )


def tiers_plot(report: JobReport) -> Plot | None:
    """Where prompts' tokens came from, in the shown configuration and the baseline. None where neither tells."""
    point = shown_point(report)
    title = "chosen" if report.choice.chosen is not None else "closest"
    rows: list[tuple[str, ReportedPoint]] = [] if point is None else [(title, point)]
    if report.baseline is not None:
        rows.append((report.baseline_title, report.baseline))
    rows = [(name, each) for name, each in rows if each.figures.prompt_tokens]
    if not rows:
        return None
    figure = go.Figure()
    said = []
    for tier, field, colour, hatching in TIERS:
        tokens = [getattr(each.figures, field) or 0.0 for _, each in rows]
        shares = [count / (each.figures.prompt_tokens or 1) for count, (_, each) in zip(tokens, rows, strict=True)]
        said.append(
            f"{tier} " + ", ".join(f"{percent(share)} ({name})" for share, (name, _) in zip(shares, rows, strict=True))
        )
        figure.add_bar(
            x=shares,
            y=[escape(name) for name, _ in rows],
            orientation="h",
            name=tier,
            marker={"color": colour, "pattern": {**_HATCHED, "shape": hatching}},
            hovertext=[
                f"{tier}: {number(count)} tokens, {percent(share)}" for count, share in zip(tokens, shares, strict=True)
            ],
            hoverinfo="text",
        )
    figure.update_layout(
        barmode="stack",
        xaxis={"title": {"text": "share of the prompts' tokens"}, "tickformat": ".0%", "automargin": True},
        yaxis={"automargin": True, "autorange": "reversed"},
        legend={"orientation": "h", "traceorder": "normal", "yanchor": "bottom", "y": 1.02, "x": 0},
        margin={"t": 40, "r": 20, "b": 50, "l": 20},
    )
    return Plot(
        "tiers",
        "Where prompts' tokens came from",
        "Tokens found in a tier need not be computed. What is computed is what GPU hours go for.",
        "Bars of shares of prompt tokens. " + "; ".join(said) + ".",
        figure,
        260,
    )


def ttl_plot(plan: TtlPlanFacts) -> Plot | None:
    """Times-to-live that are limits, by group. None where there are none."""
    limited = [(group, group.ttl_s) for group in plan.groups if group.ttl_s is not None]
    dropped = len(limited) - _MOST_GROUPS
    limited = sorted(limited, key=lambda each: -each[0].hits)[:_MOST_GROUPS]
    if not limited:
        return None
    names = [escape(group.name) for group, _ in limited]
    figure = go.Figure()
    figure.add_bar(
        x=[ttl_s for _, ttl_s in limited],
        y=names,
        orientation="h",
        marker={"color": MARKS["front"]},
        hovertext=[
            f"{escape(group.name)}<br>TTL {with_unit(ttl_s, 's')}<br>"
            f"{number(group.hits)} of {number(group.reuses)} re-uses hit<br>{number(group.block_s)} block-seconds"
            for group, ttl_s in limited
        ],
        hoverinfo="text",
    )
    if plan.uniform_ttl_s is not None:
        figure.add_vline(
            x=plan.uniform_ttl_s,
            line={"dash": "dash", "width": 1.5, "color": MARKS["chosen"]},
            annotation={"text": f"one TTL for all: {with_unit(plan.uniform_ttl_s, 's')}"},
            annotation_position="top",
        )
    figure.update_layout(
        xaxis={"title": {"text": "time-to-live (s)"}, "rangemode": "tozero", "separatethousands": True},
        yaxis={"automargin": True, "autorange": "reversed", "type": "category"},
        margin={"t": 30, "r": 20, "b": 50, "l": 20},
    )
    return Plot(
        "ttl",
        "Time-to-live by group",
        "How long a block is kept after its last use. Groups without a limit are in the table only"
        + (f", and so are {dropped} that have fewer hits." if dropped > 0 else "."),
        "Bars of times-to-live: "
        + ", ".join(f"{group.name} {with_unit(ttl_s, 's')}" for group, ttl_s in limited)
        + ".",
        figure,
        120 + 26 * len(limited),
    )
