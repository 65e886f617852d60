from __future__ import annotations

from tuning.deployment.objectives import Goals
from tuning.job.choice import choose, default_rule, extremes
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.result import EvaluatedPoint

# (TTFT, minus throughput, cost). The knee loses a tenth of both ranges, the others all of one.
FAST = EvaluatedPoint({"dram_gib": 3}, Evaluation((1.0, -200.0, 20.0)))
CHEAP = EvaluatedPoint({"dram_gib": 1}, Evaluation((2.0, -100.0, 10.0)))
KNEE = EvaluatedPoint({"dram_gib": 2}, Evaluation((1.1, -190.0, 11.0)))
FRONT = (CHEAP, FAST, KNEE)


def test_each_rule_chooses_its_point() -> None:
    assert choose(FRONT, "cheapest") is CHEAP
    assert choose(FRONT, "fastest") is FAST
    assert choose(FRONT, "knee") is KNEE
    assert choose((FAST,), "knee") is FAST


def test_equals_are_told_apart_by_the_rest() -> None:
    dearer = EvaluatedPoint({"dram_gib": 4}, Evaluation((1.0, -210.0, 21.0)))
    assert choose((dearer, FAST), "fastest") is FAST
    slower = EvaluatedPoint({"dram_gib": 0}, Evaluation((2.5, -120.0, 10.0)))
    assert choose((slower, CHEAP), "cheapest") is CHEAP


def test_extremes_are_the_best_in_one_objective() -> None:
    assert extremes(FRONT) == {"ttft": FAST, "throughput": FAST, "cost": CHEAP}


def test_limits_say_what_is_wanted() -> None:
    assert default_rule(Goals()) == "knee"
    assert default_rule(Goals(budget_per_hour=5.0)) == "fastest"
    assert default_rule(Goals(budget_per_hour=5.0, slo_tpot_s=0.1)) == "cheapest"
