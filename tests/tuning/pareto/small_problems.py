"""Objectives at the top level of a module, as processes need them."""

from __future__ import annotations

import math
from collections.abc import Callable

from tuning.pareto.evaluation import Evaluation
from tuning.pareto.space import NumericAxis, Point, SearchSpace

SPACE = SearchSpace(
    (NumericAxis("dram_gib", (0, 512, 1024, 1536, 2048), 32), NumericAxis("ttl_s", (0, 600, 1200, 1800, 2400), 60))
)
NAMES = ("ttft_s", "cost")


def smooth(point: Point) -> Evaluation:
    hits = (1 - math.exp(-float(point["dram_gib"]) / 500)) * (1 - math.exp(-float(point["ttl_s"]) / 500))
    return Evaluation((2 - hits, 10 - hits + 0.003 * float(point["dram_gib"])), info={"hits": hits})


def limited(point: Point) -> Evaluation:
    """`smooth` with a limit on each of the objectives."""
    each = smooth(point)
    return Evaluation(each.objectives, (each.objectives[0] - 1.4, each.objectives[1] - 13.0))


def counting(evaluate: Callable[[Point], Evaluation]) -> tuple[Callable[[Point], Evaluation], list[Point]]:
    calls: list[Point] = []

    def counted(point: Point) -> Evaluation:
        calls.append(point)
        return evaluate(point)

    return counted, calls
