"""A job small enough to work out by hand: four points and a baseline.

point     EUR an hour      TTFT mean, p99   tokens/s
frugal    2.40+2.00+0.32   0.8, 3.5 s       5,500     chosen: 20 % cheaper, 60 % sooner, 10 % more than the baseline
fast      2.40+4.68+0.00   0.5, 2.0 s       5,500     20 % dearer, 75 % sooner
beaten    2.40+5.00+0.00   0.9, 3.6 s       5,400
slow      2.40+1.14+0.00   1.9, 6.0 s       4,000     misses the limit of 4 s by 2 s, which is 50 %
baseline  2.40+3.50+0.00   2.0, 3.9 s       5,000
"""

from __future__ import annotations

import dataclasses

from tuning.report.content import (
    Axis,
    Bill,
    Choice,
    Figures,
    HitCurve,
    JobReport,
    LeftOut,
    Objective,
    ReportedPoint,
    ReuseRatios,
    Slo,
    TtlGroup,
    TtlPlanFacts,
)
from tuning.report.facts import HardwareFacts, ModelFacts, PriceFacts, SearchFacts, TraceFacts

FRUGAL, FAST, BEATEN, SLOW = range(4)


def point(
    dram_gib: int,
    disk_gib: int,
    ttft_s: tuple[float, float, float],
    tokens_per_s: float,
    storage_per_hour: tuple[float, float],
    *,
    on_front: bool = False,
) -> ReportedPoint:
    """`ttft_s` is mean, p99 and worst window. A replay takes an hour, so that it costs what an hour does."""
    mean_s, p99_s, window_s = ttft_s
    nothing: dict[str, float | None] = dict.fromkeys((field.name for field in dataclasses.fields(Figures)), None)
    figures = Figures.of_summary(
        nothing
        | {
            "ttft_mean_s": mean_s,
            "ttft_p99_s": p99_s,
            "ttft_worst_window_s": window_s,
            "tokens_per_s": tokens_per_s,
            "prompt_tokens": 1_000_000,
            "hit_tokens_device": 100_000,
            "hit_tokens_dram": 300_000,
            "hit_tokens_disk": 50_000,
            "computed_tokens": 550_000,
        }
    )
    bill = Bill(2.40, *storage_per_hour, gpus=2)
    settings: dict[str, float | int | str] = {
        "dram_gib": dram_gib,
        "disk_gib": disk_gib,
        "disk_class": "nvme" if disk_gib else "none",
        "ttl_s": 600.5,
    }
    return ReportedPoint(settings, (mean_s, tokens_per_s, bill.per_hour), (p99_s,), on_front, bill, figures)


def small_job() -> JobReport:
    """The job above."""
    return JobReport(
        trace=TraceFacts("chat.jsonl", 7200, 3600.0, 1.0, 1500.25, 200.0, 512, 4000, 0.4),
        model=ModelFacts("qwen3-8b", 8_190_735_360, 16_381_470_720, 147_456, 40_960),
        hardware=HardwareFacts("a100-80g", 80 * 2**30, 2.039e12, 312e12, 25e9, 12.5e9, "peak figures times shares"),
        prices=PriceFacts("ours", "EUR", "2026-11-29", "invoices", 730.0, 1.20),
        search=SearchFacts("pareto", 1, 5, 0, 12.5, {"partial_blocks": "hit"}),
        axes=(
            Axis("dram_gib", "DRAM", "GiB"),
            Axis("disk_gib", "disk", "GiB"),
            Axis("disk_class", "disk class", ""),
            Axis("ttl_s", "TTL", "s"),
        ),
        objectives=(
            Objective("ttft_mean_s", "mean time to first token", "s", "lower"),
            Objective("tokens_per_s", "throughput", "tokens/s", "higher"),
            Objective("cost", "cost of the replay", "EUR", "lower"),
        ),
        slos=(Slo("ttft_p99_s", "99th percentile of the time to first token", "s", 4.0),),
        points=(
            point(512, 2048, (0.8, 3.5, 4.5), 5500.0, (2.00, 0.32), on_front=True),
            point(2048, 0, (0.5, 2.0, 0.9), 5500.0, (4.68, 0.0), on_front=True),
            point(2304, 0, (0.9, 3.6, 1.2), 5400.0, (5.00, 0.0)),
            point(256, 0, (1.9, 6.0, 5.0), 4000.0, (1.14, 0.0)),
        ),
        baseline=point(1024, 0, (2.0, 3.9, 2.5), 5000.0, (3.50, 0.0)),
        baseline_title="fixed 1024 GiB of DRAM",
        choice=Choice("the cheapest configuration within the limits", FRUGAL, None),
        skipped=(
            LeftOut(point(3072, 0, (1, 1, 1), 1, (0, 0)).point, "at best 0.00002 more hypervolume"),
            LeftOut(point(4096, 0, (1, 1, 1), 1, (0, 0)).point, "at best 3e-05 more hypervolume"),
            LeftOut(point(0, 0, (1, 1, 1), 1, (0, 0)).point, "constraint 0 is broken at dram_gib=0"),
        ),
        failed=(LeftOut(point(128, 0, (1, 1, 1), 1, (0, 0)).point, "nothing was completed"),),
        hit_curve=HitCurve((256.0, 512.0, 1024.0), (0.1, 0.25, 0.375), 0.4, "LRU, one pool"),
        ttl_plan=TtlPlanFacts(
            groups=(
                TtlGroup("rest", 3900, 1000, 250, 123_456.0, 120.0),
                TtlGroup("support-bot", 100, 600, 600, 9000.0, None),
            ),
            budget_block_s=140_000.0,
            method="slsqp",
            uniform_ttl_s=130.0,
            comparisons=(ReuseRatios("the same trace", 0.21, 0.22, 0.25, 0.26),),
        ),
        warnings=("The clock counts from an epoch.",),
        command="python -m tuning.job --trace chat.jsonl",
        versions={"optuna": "5.0.0"},
        created="2026-11-29T12:00:00+00:00",
    )


def infeasible_job() -> JobReport:
    """The same with a limit of 1.6 s: `fast` comes closest and misses it by 0.4 s, 25 %."""
    job = small_job()
    return dataclasses.replace(
        job,
        slos=(dataclasses.replace(job.slos[0], limit=1.6),),
        points=tuple(dataclasses.replace(each, on_front=False) for each in job.points),
        choice=Choice("the cheapest configuration within the limits", None, FAST),
    )
