"""Which point of a front to serve with, and which ones to compare with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from tuning.deployment.objectives import Goals
from tuning.pareto.front import ObjectiveScale
from tuning.pareto.result import EvaluatedPoint

Rule = Literal["cheapest", "fastest", "knee"]

TTFT, THROUGHPUT, COST = range(3)
"""Objectives by their place."""


def default_rule(goals: Goals) -> Rule:
    """What the limits that were given ask for."""
    if goals.slo_ttft_s is not None or goals.slo_tpot_s is not None:
        return "cheapest"
    return "knee" if goals.budget_per_hour is None else "fastest"


def choose(front: Sequence[EvaluatedPoint], rule: Rule) -> EvaluatedPoint:
    """A point of a front, all of whose points keep the limits; at least one.

    The knee is the point next to the ideal, when each objective is scaled to its range on the front (ours).
    """
    if rule == "cheapest":
        return min(front, key=lambda each: (each.evaluation.objectives[COST], each.evaluation.objectives))
    if rule == "fastest":
        return min(front, key=lambda each: (each.evaluation.objectives[TTFT], each.evaluation.objectives[COST]))
    scale = ObjectiveScale.of(each.evaluation.objectives for each in front)
    return min(front, key=lambda each: math.hypot(*scale.scaled(each.evaluation.objectives)))


def extremes(front: Sequence[EvaluatedPoint]) -> dict[str, EvaluatedPoint]:
    """The best point in each objective by itself; of equal ones the cheapest."""
    return {
        name: min(front, key=lambda each: (each.evaluation.objectives[index], each.evaluation.objectives[COST]))
        for name, index in (("ttft", TTFT), ("throughput", THROUGHPUT), ("cost", COST))
    }
