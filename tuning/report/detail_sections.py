"""The end of the page: TTLs by group, what was left out, all points, and what everything was made with."""

from __future__ import annotations

import re

from tuning.report.cache_plots import ttl_plot
from tuning.report.content import JobReport, LeftOut, ReportedPoint
from tuning.report.findings import by_reason, per_month
from tuning.report.markup import Html, code_block, details, heading, paragraph, section, table
from tuning.report.plotted import Plot
from tuning.report.quantities import duration, gb_per_s, gib, money, number, percent, with_unit
from tuning.report.wording import settings, status, titled


def ttl_parts(report: JobReport) -> tuple[list[Html], Plot | None]:
    """What is said of TTLs, and the plot that goes before it."""
    plan = report.ttl_plan
    if plan is None:
        return [paragraph("No times-to-live by group were made. The beginning of the page says why.")], None
    budget = "no limit" if plan.budget_block_s is None else f"{number(plan.budget_block_s)} block-seconds"
    uniform = "no limit" if plan.uniform_ttl_s is None else with_unit(plan.uniform_ttl_s, "s")
    parts = [
        paragraph(
            f'A group is a prefix that many prompts share, with all that follows it; "rest" is what lies in none. '
            f"Budget of storage: {budget}; the best single TTL for all within it: {uniform}. Method: {plan.method}. "
            "A block-second is a block held for a second."
        ),
        table(
            "Times-to-live by group",
            ["Group", "TTL", "Blocks", "Re-uses", "Hits", "Hits of re-uses", "Block-seconds"],
            [
                [
                    group.name,
                    "no limit" if group.ttl_s is None else with_unit(group.ttl_s, "s"),
                    number(group.blocks),
                    number(group.reuses),
                    number(group.hits),
                    percent(group.hits / group.reuses) if group.reuses else "none",
                    number(group.block_s),
                ]
                for group in plan.groups
            ],
        ),
    ]
    if plan.comparisons:
        parts.append(
            table(
                "Share of all block uses that hit, at an equal budget",
                ["On", "LRU", "One TTL for all", "TTL by group", "TTL by group, pool full"],
                [
                    [each.name, *map(percent, (each.lru, each.uniform_ttl, each.group_ttl, each.group_ttl_in_pool))]
                    for each in plan.comparisons
                ],
            )
        )
    return parts, ttl_plot(plan)


def left_out_section(report: JobReport) -> Html:
    """What was not evaluated, and why, in words."""
    search = report.search
    parts = [
        paragraph(
            f"{len(report.points) + len(report.failed)} configurations were evaluated of at most {search.budget}, "
            f"and {len(report.skipped)} were considered and left out. "
            "Hypervolume is how much of what could be had the front covers: a point that adds next to none to it at "
            "best is not worth a simulation. A plateau is where two steps in a row along a setting gained nothing to "
            "speak of."
        )
    ]
    if report.skipped:
        in_words = [LeftOut(each.point, _in_words(report, each.reason)) for each in report.skipped]
        rows = [[reason, number(count)] for reason, count in by_reason(in_words)]
        parts.append(table("Left out, by reason", ["Reason", "Configurations"], rows))
        parts.append(details("All that were left out", [_left_out("Left out", report, report.skipped)]))
    if report.failed:
        parts.append(heading("Evaluated without a result"))
        parts.append(_left_out("Evaluated without a result", report, report.failed))
    return section("left-out", "What was skipped, and why", parts)


def points_section(report: JobReport) -> Html:
    """Every figure of the plots."""
    header = ["No.", *(titled(axis.title, axis.unit) for axis in report.axes)]
    header += [titled(each.title, each.unit) for each in report.objectives]
    header += [titled(slo.title, slo.unit) for slo in report.slos]
    header += ["Bill a month", "Status"]
    rows = [_row(report, str(place), each) for place, each in enumerate(report.points, 1)]
    if report.choice.chosen is not None:
        rows[report.choice.chosen][-1] += ", chosen"
    if report.baseline is not None:
        rows.append(_row(report, "Baseline", report.baseline))
    listed = table("Evaluated configurations, in the order in which the search asked for them", header, rows)
    return section(
        "points", "All configurations", [details(f"{len(report.points)} configurations", [listed], printed=True)]
    )


def made_with_section(report: JobReport) -> Html:
    """Trace, model, devices, prices, search, program."""
    trace, model, hardware, prices, search = (
        report.trace,
        report.model,
        report.hardware,
        report.prices,
        report.search,
    )
    block_rows = [("Blocks", "no reuse information: the trace has no block hashes")]
    if trace.block_tokens is not None:
        block_rows = [("Tokens a block", number(trace.block_tokens))]
        if trace.different_blocks is not None:
            block_rows.append(("Different blocks", number(trace.different_blocks)))
        if trace.ideal_block_hit_ratio is not None:
            block_rows.append(("Hit ratio with room for everything", percent(trace.ideal_block_hit_ratio)))
    rate = f"{number(trace.requests / trace.span_s)} requests/s" if trace.span_s else "all at once"
    tables = {
        "Trace": [
            ("Name", trace.name),
            ("Requests", f"{number(trace.requests)}, {rate}"),
            ("From first to last arrival", duration(trace.span_s)),
            ("Arrivals made more frequent by", f"{number(trace.rate_factor)} times"),
            ("Mean prompt", with_unit(trace.mean_input_tokens, "tokens")),
            ("Mean answer", with_unit(trace.mean_output_tokens, "tokens")),
            *block_rows,
        ],
        "Model": [
            ("Name", model.name),
            ("Parameters", number(model.parameters)),
            ("Weights", gib(model.weight_bytes)),
            ("KV of a token", with_unit(model.kv_bytes_per_token, "bytes")),
            ("Longest context", with_unit(model.max_context_tokens, "tokens")),
        ],
        "GPU": [
            ("Profile", hardware.name),
            ("Memory", f"{gib(hardware.memory_bytes)}, {gb_per_s(hardware.memory_bytes_per_s)}"),
            ("Peak", f"{number(hardware.flops_per_s / 1e12)} TFLOP/s"),
            ("Link to host memory", gb_per_s(hardware.host_link_bytes_per_s)),
            ("Network", gb_per_s(hardware.network_bytes_per_s)),
            ("Times of steps", hardware.timing),
        ],
        "Prices": [
            ("Book", prices.name),
            ("As of", prices.as_of),
            ("Source", prices.source),
            ("GPU hour", money(prices.gpu_hour, prices.currency)),
            ("Hours a month", number(prices.hours_per_month)),
        ],
        "Search": [
            ("Method", search.method),
            ("Seed", str(search.seed)),
            ("Budget", with_unit(search.budget, "evaluations")),
            ("Asked for again, answered from memory", number(search.duplicates)),
            ("Time of the last run", duration(search.wall_s)),
        ],
        "All configurations alike": list(search.simulation_settings.items()),
        "Versions": list(report.versions.items()),
    }
    parts = [
        table(name, ["What", "Value"], [list(row) for row in rows], text_columns=2)
        for name, rows in tables.items()
        if rows
    ]
    parts += [heading("Command line"), code_block(report.command)]
    return section("made-with", "What this was made with", parts)


def _row(report: JobReport, name: str, point: ReportedPoint) -> list[str]:
    return [
        name,
        *(with_unit(point.point[axis.name], "") for axis in report.axes),
        *(with_unit(value, "") for value in (*point.objectives, *point.slo_values)),
        money(per_month(report, point.bill.per_hour), report.prices.currency),
        status(report, point),
    ]


def _left_out(caption: str, report: JobReport, points: tuple[LeftOut, ...]) -> Html:
    rows = [[settings(report, each.point), _in_words(report, each.reason)] for each in points]
    return table(caption, ["Configuration", "Reason"], rows, text_columns=2)


def _in_words(report: JobReport, reason: str) -> str:
    """A reason with titles in place of the names of settings and the numbers of limits."""
    titles = {f"constraint {place}": f"the limit of the {slo.title}" for place, slo in enumerate(report.slos)}
    titles |= {axis.name: axis.title for axis in report.axes}
    for name, title in titles.items():
        reason = re.sub(rf"\b{re.escape(name)}\b", title.replace("\\", r"\\"), reason)
    return reason
