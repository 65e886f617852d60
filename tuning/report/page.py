"""The report as one HTML file that needs neither network nor other files."""

from __future__ import annotations

import json
from html import escape
from typing import Final

from plotly.offline import get_plotlyjs

from tuning.report.cache_plots import hit_curve_plot, tiers_plot
from tuning.report.caveats import caveats_section
from tuning.report.comparison_section import bill_section, extremes_section, latency_section
from tuning.report.content import JobReport
from tuning.report.detail_sections import left_out_section, made_with_section, points_section, ttl_parts
from tuning.report.markup import Html, paragraph, plot, section
from tuning.report.pareto_plots import pareto_plots
from tuning.report.plotted import Plot
from tuning.report.script import SCRIPT
from tuning.report.style import PALETTES, style_sheet
from tuning.report.summary_section import summary_section

# Whatever is in the page, a browser fetches nothing for it.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'"
)
_CONTENTS: Final = (
    ("summary", "In short"),
    ("pareto", "Cost and what it buys"),
    ("extremes", "Extreme points"),
    ("waiting", "What users wait for"),
    ("bill", "The bill"),
    ("cache", "What the cache does"),
    ("ttl-groups", "Times-to-live"),
    ("left-out", "What was skipped"),
    ("points", "All configurations"),
    ("caveats", "What the figures can say"),
    ("made-with", "What this was made with"),
)


def html_page(report: JobReport) -> str:
    """The page. Equal reports make equal pages.

    It can be read without scripts, but for the plots, whose figures stand in tables too.
    """
    pareto = pareto_plots(report)
    cache = [] if report.hit_curve is None else [hit_curve_plot(report.hit_curve)]
    tiers = tiers_plot(report)
    if tiers is not None:
        cache.append(tiers)
    ttl_text, ttl = ttl_parts(report)
    ttls = [] if ttl is None else [ttl]
    cache_parts = _drawn(cache)
    if report.hit_curve is None:
        cache_parts.insert(0, paragraph("No hit ratio against capacity: the trace has no reuse information."))
    sections = [
        summary_section(report),
        section("pareto", "Cost and what it buys", _drawn(pareto) or [paragraph("Nothing was simulated.")]),
        extremes_section(report),
        latency_section(report),
        bill_section(report),
        section("cache", "What the cache does", cache_parts),
        section("ttl-groups", "Times-to-live by group", [*_drawn(ttls), *ttl_text]),
        left_out_section(report),
        points_section(report),
        caveats_section(report),
        made_with_section(report),
    ]
    title = f"Tuning report: {report.model.name} on {report.hardware.name}"
    contents = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for name, words in _CONTENTS)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style_sheet()}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="soft">How much memory and disk the cache deserves under {escape(report.trace.name)}.
Made {escape(report.created.replace("T", " "))}. All figures are simulated; prices of {escape(report.prices.name)},
{escape(report.prices.as_of)}.</p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
</header>
<noscript><p class="warning">Plots need scripts. Their figures are in the tables as well.</p></noscript>
<main>
{"".join(each.text for each in sections)}
</main>
<script type="application/json" id="plots">{_plots_json([*pareto, *cache, *ttls])}</script>
<script type="application/json" id="palettes">{json.dumps(PALETTES)}</script>
<script>{get_plotlyjs()}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _drawn(plots: list[Plot]) -> list[Html]:
    return [
        plot(each.name, each.title, each.caption, each.description, each.height_px, each.least_width_px)
        for each in plots
    ]


def _plots_json(plots: list[Plot]) -> str:
    """By id, without a character that could end the script element."""
    figures = {}
    for each in plots:
        each.figure.update_layout(template="none", height=each.height_px)
        figures[each.name] = json.loads(each.figure.to_json())
    return json.dumps(figures).replace("<", "\\u003c")
