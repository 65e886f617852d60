"""The beginning of the page: what was chosen, what it costs, what it gains, whether limits hold."""

from __future__ import annotations

from tuning.report.content import JobReport, ReportedPoint
from tuning.report.findings import COST, LATENCY, THROUGHPUT, SloCheck, per_month, shown_point, slo_checks
from tuning.report.markup import Html, Tile, bullets, paragraph, section, tiles
from tuning.report.quantities import change, money, with_unit
from tuning.report.wording import PRICE, SENSES, capital, judged_change, limit_sentence, settings, window_sentence


def summary_section(report: JobReport) -> Html:
    """For who reads no further."""
    point = shown_point(report)
    parts = _opening(report, point)
    if point is not None:
        parts.append(tiles(_tiles(report, point)))
        parts.append(paragraph(_cost_sentence(report, point)))
        if report.baseline is not None:
            parts.append(paragraph(_against_baseline(report, point, report.baseline)))
        checks = slo_checks(report, point)
        if checks:
            parts.append(bullets([f"{limit_sentence(each)} {window_sentence(each)}".strip() for each in checks]))
        else:
            parts.append(paragraph("No limit was set, so every configuration counts as good enough."))
    parts += [paragraph(capital(warning), "note") for warning in report.warnings]
    return section("summary", "In short", parts, "summary")


def _opening(report: JobReport, point: ReportedPoint | None) -> list[Html]:
    if point is None:
        return [paragraph("Nothing can be recommended: none of the configurations could be simulated.", "lead")]
    if report.choice.chosen is not None:
        return [paragraph(f"Chosen: {settings(report, point.point)}. It is {report.choice.rule}.", "lead")]
    return [
        paragraph("Nothing can be recommended: no configuration that was simulated meets all limits.", "lead"),
        paragraph(f"Closest comes: {settings(report, point.point)}. Its figures follow, and by how much it misses."),
    ]


def _tiles(report: JobReport, point: ReportedPoint) -> list[Tile]:
    currency, baseline = report.prices.currency, report.baseline
    month = per_month(report, point.bill.per_hour)
    against = "" if baseline is None else judged_change(month, per_month(report, baseline.bill.per_hour), PRICE)
    entries = [Tile("A month costs", money(month, currency), against)]
    for place in (LATENCY, THROUGHPUT):
        objective = report.objectives[place]
        value = point.objectives[place]
        verdict = "" if baseline is None else judged_change(value, baseline.objectives[place], SENSES[place])
        entries.append(Tile(capital(objective.title), with_unit(value, objective.unit), verdict))
    if report.slos:
        entries.append(_limits_tile(slo_checks(report, point)))
    return entries


def _limits_tile(checks: list[SloCheck]) -> Tile:
    missed = sum(not each.holds for each in checks)
    seen = [each.window_holds for each in checks if each.window_holds is not None]
    remark = ""
    if seen:
        remark = "in the worst 5 min too, on average" if all(seen) else "not in the worst 5 min, on average"
    if missed:
        return Tile("Limits", f"{missed} of {len(checks)} missed", "so nothing is recommended", "worse")
    return Tile("Limits", "all hold", remark, "better" if all(seen) else "worse")


def _cost_sentence(report: JobReport, point: ReportedPoint) -> str:
    currency, bill, cost = report.prices.currency, point.bill, report.objectives[COST]
    return (
        f"It costs {money(bill.per_hour, currency)} an hour, "
        f"{money(per_month(report, bill.per_hour), currency)} a month of "
        f"{with_unit(report.prices.hours_per_month, 'h')} in which it runs all the time: "
        f"{money(bill.gpu_per_hour, currency)} an hour for GPUs ({bill.gpus}), "
        f"{money(bill.dram_per_hour, currency)} for DRAM, {money(bill.disk_per_hour, currency)} for disk. "
        f"The {cost.title} is {with_unit(point.objectives[COST], cost.unit)}."
    )


def _against_baseline(report: JobReport, point: ReportedPoint, baseline: ReportedPoint) -> str:
    currency = report.prices.currency
    month, before = (per_month(report, each.bill.per_hour) for each in (point, baseline))
    if month == before:
        bill = "its bill is the same"
    else:
        word = "less" if month < before else "more"
        bill = f"its bill is {money(abs(month - before), currency)} a month {word} ({change(month, before)})"
    gains = [
        f"{objective.title} {with_unit(value, objective.unit)} instead of {with_unit(base, objective.unit)}: "
        f"{judged_change(value, base, SENSES[place])}"
        for place, (objective, value, base) in enumerate(
            zip(report.objectives, point.objectives, baseline.objectives, strict=True)
        )
    ]
    holds = ""
    if report.slos:
        holds = (
            " The baseline meets all limits."
            if report.meets_slos(baseline)
            else " The baseline does not meet all limits."
        )
    return f"Against the baseline, {report.baseline_title}: {bill}; {'; '.join(gains)}.{holds}"
