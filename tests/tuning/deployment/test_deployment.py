"""From a point to what is simulated, and what that is worth."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from tests.tuning.round_figures import prices_for
from tests.tuning.simulator.tiny import MODEL, make_timing, make_trace, names
from tuning.deployment.deployment import GIB, Deployment, ServingOptions, simulation_settings
from tuning.deployment.evaluator import DeploymentEvaluator
from tuning.deployment.objectives import Goals, judged
from tuning.price_book import read_prices

HARDWARE = make_timing().hardware
PRICES = prices_for(HARDWARE.name)
# Two prompts of 100 tokens that share 90: 100 ms alone, 10 ms with the other's blocks.
TRACE = make_trace([(0.0, 100, 2, names("a", 10)), (10.0, 100, 2, [*names("a", 9), "b"])])


def evaluator(trace: Any = TRACE, **goals: Any) -> DeploymentEvaluator:
    return DeploymentEvaluator(trace, MODEL, HARDWARE, PRICES, Deployment(), ServingOptions(), Goals(**goals))


def test_a_point_changes_what_it_names() -> None:
    fixed = Deployment("static", prefill_instances=2, disk_class="ssd")
    found = fixed.at({"decode_instances": 3, "dram_gib": 4, "eviction": "lfu"})
    assert found == replace(fixed, decode_instances=3, dram_gib=4, eviction="lfu")
    assert found.num_instances == 5
    assert Deployment("monolithic", 7).num_instances == 7


@pytest.mark.parametrize(("ttl_s", "expected_s"), [(0, 1e-6), (59, 59), (60, None), (100, None)])
def test_a_time_to_live_as_long_as_the_trace_is_no_limit(ttl_s: float, expected_s: float | None) -> None:
    assert Deployment(dram_gib=1).at({"ttl_s": ttl_s}, longest_ttl_s=60.0).policy.default_ttl_s == expected_s


@pytest.mark.parametrize(
    ("sizes", "ttl_s", "expected_s"),
    [
        ({}, 0, None),
        ({}, 60, None),
        ({"dram_gib": 1}, 0, 1e-6),
        ({"disk_gib": 1}, 60, 60),
        ({"dram_gib": 1}, None, None),
    ],
)
def test_without_room_there_is_no_time_to_live(
    sizes: dict[str, Any], ttl_s: float | None, expected_s: float | None
) -> None:
    assert Deployment(ttl_s=ttl_s, **sizes).policy.default_ttl_s == expected_s


def test_a_disk_gets_half_of_its_rate_each_way() -> None:
    deployment = Deployment(dram_gib=1.5, disk_gib=10, disk_class="ssd")
    settings = simulation_settings(deployment, HARDWARE, PRICES, ServingOptions())
    assert (settings.dram_bytes, settings.disk_bytes) == (3 * GIB // 2, 10 * GIB)
    assert settings.disk_read_bytes_per_s == settings.disk_write_bytes_per_s == 40e6
    assert settings.disk_iops == 250
    with pytest.raises(ValueError, match="without a disk class"):
        simulation_settings(replace(deployment, disk_class=None), HARDWARE, PRICES, ServingOptions())


def test_objectives_are_those_of_the_simulation_and_its_bill() -> None:
    judged = evaluator(slo_ttft_s=0.2, budget_per_hour=4.0)({"dram_gib": 4})
    info = judged.info
    ttft_s, minus_tokens_per_s, cost = judged.objectives
    assert ttft_s == info["ttft_mean_s"]
    assert -minus_tokens_per_s * info["makespan_s"] == pytest.approx(204)
    assert info["cost_per_hour"] == pytest.approx(3.0 + 4 * 0.5)
    assert cost == pytest.approx(info["cost_per_hour"] * info["makespan_s"] / 3600)
    assert judged.constraints == pytest.approx((info["ttft_p99_s"] - 0.2, 1.0))
    assert not judged.is_feasible


def test_a_slow_configuration_costs_more_for_the_same_trace() -> None:
    at_once = make_trace([(0.0, 100, 2, names(letter, 10)) for letter in "abcdef"])
    slow = evaluator(at_once)({"monolithic_instances": 1})
    half_as_dear = replace(PRICES, gpu_hour={HARDWARE.name: 1.5})
    fast = replace(evaluator(at_once), prices=half_as_dear)({"monolithic_instances": 2})
    assert fast.info["cost_per_hour"] == slow.info["cost_per_hour"]
    assert fast.objectives[2] < slow.objectives[2]


def test_answers_of_one_token_break_no_limit_between_tokens() -> None:
    single = make_trace([(0.0, 10, 1, ["a"])])
    judged = evaluator(single, slo_tpot_s=0.1)({})
    assert judged.is_feasible
    assert judged.info["tpot_mean_s"] is None


def test_a_budget_that_is_the_very_price_is_kept_whatever_sums_of_floats_round_to() -> None:
    prices = read_prices("aws-us-east-1")
    num_above = 0
    for instances in range(1, 9):
        for dram_gib in range(0, 2049, 64):
            exact = Decimal("3.431") * instances + Decimal("0.003417") * dram_gib
            deployment = Deployment("monolithic", instances, dram_gib=dram_gib)
            price = deployment.cost_per_hour(prices, "a100-80g")
            num_above += price > float(exact)
            info = {"ttft_mean_s": 1.0, "tokens_per_s": 1.0, "cost": 1.0, "cost_per_hour": price}
            assert judged(info, Goals(budget_per_hour=float(exact))).is_feasible
            assert not judged(info, Goals(budget_per_hour=float(exact - Decimal("0.000001")))).is_feasible
    assert num_above > 0
