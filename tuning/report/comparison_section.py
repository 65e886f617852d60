"""Tables beside each other: the extreme points, the bill and the worst five minutes, against the baseline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tuning.report.content import Figures, JobReport, ReportedPoint
from tuning.report.findings import COST, extremes, per_million_tokens, per_month, shown_point
from tuning.report.markup import Html, paragraph, section, table
from tuning.report.quantities import NOT_SEEN, change, money, with_unit
from tuning.report.wording import PRICE, RATE, SENSES, TIME, Sense, judged_change, settings, titled

_LATENCIES = (
    ("time to first token", "ttft"),
    ("time per output token", "tpot"),
    ("between two tokens", "itl"),
    ("whole answer", "e2e"),
)


def extremes_section(report: JobReport) -> Html:
    """The best configuration in each objective, which are different ones."""
    found = extremes(report)
    if not found:
        return section(
            "extremes", "Extreme points", [paragraph("There is no front: no configuration meets all limits.")]
        )
    baseline = report.baseline
    header = [
        "Extreme",
        "Configuration",
        *(titled(each.title, each.unit) for each in report.objectives),
        "Bill a month",
    ]
    rows = []
    for objective, point in found:
        rows.append(
            [_extreme(objective.title, objective.better), settings(report, point.point), *_values(report, point)]
        )
        if baseline is not None:
            changes = [
                judged_change(value, before, SENSES[place])
                for place, (value, before) in enumerate(zip(point.objectives, baseline.objectives, strict=True))
            ]
            bill = judged_change(point.bill.per_hour, baseline.bill.per_hour, PRICE)
            rows.append(["… against the baseline", "", *changes, bill])
    if baseline is not None:
        title = f"Baseline: {report.baseline_title}"
        rows.append([title, settings(report, baseline.point), *_values(report, baseline)])
    remark = (
        "Each is the best in one objective among the configurations that meet the limits. Where they differ, no single "
        "one has all of the gains. Percentages are of the baseline's value."
    )
    return section(
        "extremes",
        "Extreme points",
        [paragraph(remark), table("Extreme points of the front", header, rows, text_columns=2)],
    )


def bill_section(report: JobReport) -> Html:
    """Where the money goes."""
    columns = _columns(report)
    currency = report.prices.currency

    def row(title: str, read: Callable[[ReportedPoint], float | None]) -> list[str]:
        return _compared(title, columns, read, partial(money, currency=currency), PRICE)

    rows = [
        row("GPUs, an hour", lambda each: each.bill.gpu_per_hour),
        row("DRAM, an hour", lambda each: each.bill.dram_per_hour),
        row("disk, an hour", lambda each: each.bill.disk_per_hour),
        row("all, an hour", lambda each: each.bill.per_hour),
        row("all, a month", lambda each: per_month(report, each.bill.per_hour)),
        row("a million tokens, prompts and answers", per_million_tokens),
        _compared("GPUs", columns, lambda each: each.bill.gpus, partial(with_unit, unit="")),
    ]
    prices = report.prices
    remark = (
        f"Prices of {prices.name} as of {prices.as_of} ({prices.source}). A month has "
        f"{with_unit(prices.hours_per_month, 'h')}, and the deployment runs all of them. A million tokens are those of "
        f"the trace's traffic: with less of it a token is dearer. The {report.objectives[COST].title} can change by "
        "another share than the bill, since a slower configuration takes longer for the same requests."
    )
    return section("bill", "The bill", [paragraph(remark), _table("Bill", columns, rows)])


def latency_section(report: JobReport) -> Html:
    """What users wait for, also when it is worst."""
    columns = _columns(report)
    rows = []
    for title, name in _LATENCIES:
        for figure, words in (
            ("mean", "mean"),
            ("p50", "median"),
            ("p99", "99th percentile"),
            ("worst_window", "mean of the worst 5 min"),
        ):
            field = f"{name}_{figure}_s"
            if field in Figures.__dataclass_fields__:
                rows.append(_compared(f"{title}, {words}", columns, _figure(field), partial(with_unit, unit="s"), TIME))
    for title, field, unit, sense in (
        ("requests", "requests_per_s", "requests/s", RATE),
        ("prompts and answers", "tokens_per_s", "tokens/s", RATE),
        ("answers", "output_tokens_per_s", "tokens/s", RATE),
        ("from the first arrival to the last token", "makespan_s", "s", TIME),
        ("requests completed", "completed_requests", "", None),
        ("requests refused", "refused_requests", "", None),
    ):
        rows.append(_compared(title, columns, _figure(field), partial(with_unit, unit=unit), sense))
    remark = (
        "The worst five minutes are the highest mean of the requests that arrived in one of the successive five "
        "minutes. Throughput is over the whole replay: a deployment that keeps up is limited by the arrivals, and no "
        "cache makes it faster."
    )
    return section(
        "waiting", "What users wait for", [paragraph(remark), _table("Latency and throughput", columns, rows)]
    )


def _columns(report: JobReport) -> list[tuple[str, ReportedPoint]]:
    """The shown configuration and the baseline, as far as they are there."""
    point = shown_point(report)
    columns = []
    if point is not None:
        columns.append(("Chosen" if report.choice.chosen is not None else "Closest", point))
    if report.baseline is not None:
        columns.append((f"Baseline: {report.baseline_title}", report.baseline))
    return columns


def _table(caption: str, columns: list[tuple[str, ReportedPoint]], rows: list[list[str]]) -> Html:
    header = ["", *(name for name, _ in columns), *(["Change"] if len(columns) == 2 else [])]
    return table(caption, header, rows)


def _compared(
    title: str,
    columns: list[tuple[str, ReportedPoint]],
    read: Callable[[ReportedPoint], float | None],
    show: Callable[[float], str],
    sense: Sense | None = None,
) -> list[str]:
    """A row. `sense` says what a change means; None: nothing by itself."""
    values = [read(point) for _, point in columns]
    cells = [NOT_SEEN if value is None else show(value) for value in values]
    if len(values) == 2:
        value, before = values
        if value is None or before is None:
            cells.append("")
        else:
            cells.append(change(value, before) if sense is None else judged_change(value, before, sense))
    return [title, *cells]


def _figure(field: str) -> Callable[[ReportedPoint], float | None]:
    return lambda point: getattr(point.figures, field)


def _values(report: JobReport, point: ReportedPoint) -> list[str]:
    values = [with_unit(value, "") for value in point.objectives]
    return [*values, money(per_month(report, point.bill.per_hour), report.prices.currency)]


def _extreme(title: str, better: str) -> str:
    return f"{'lowest' if better == 'lower' else 'highest'} {title}"
