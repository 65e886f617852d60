"""What a simulated deployment is worth: objectives, limits, and the figures beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuning.deployment.deployment import Deployment
from tuning.hardware_profile import HardwareProfile
from tuning.pareto.evaluation import Evaluation
from tuning.price_book import PriceBook
from tuning.simulator.result import SimulationResult, TierResult

Statistic = Literal["mean", "p99"]
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Goals:
    """Which figures count, and their limits; None for no limit."""

    ttft: Statistic = "mean"
    """That is made small."""
    slo: Statistic = "p99"
    """That must keep the limits."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    budget_per_hour: float | None = None

    @property
    def objective_names(self) -> tuple[str, str, str]:
        """All are made small, so the throughput has a minus sign."""
        return (f"ttft_{self.ttft}_s", "minus_tokens_per_s", "cost")

    @property
    def limits(self) -> dict[str, float]:
        """By the name of the figure, in the order of an evaluation's constraints."""
        limits = {
            f"ttft_{self.slo}_s": self.slo_ttft_s,
            f"tpot_{self.slo}_s": self.slo_tpot_s,
            "cost_per_hour": self.budget_per_hour,
        }
        return {name: limit for name, limit in limits.items() if limit is not None}


def judge(
    result: SimulationResult, deployment: Deployment, hardware: HardwareProfile, prices: PriceBook, goals: Goals
) -> Evaluation:
    """The evaluation of a simulation.

    The cost is that of serving the trace, Kareto's equation 2 (arXiv 2603.08739): all devices and the store from the
    first arrival to the last token. Figures of the result stand in `info`, NaN as None, with `cost` and `cost_per_hour`
    beside them.

    Raises:
        ValueError: the book has no price for something.
    """
    hours = result.makespan_s / _HOUR_S
    figures = result.summary() | {
        "cost": prices.cost(
            deployment.num_instances * hours,
            deployment.dram_gib,
            deployment.disk_class,
            deployment.disk_gib,
            hours,
            hardware=hardware.name,
        ),
        "cost_per_hour": deployment.cost_per_hour(prices, hardware.name),
        "busy_share": sum(each.busy_share for each in result.instances) / len(result.instances),
    }
    info: dict[str, Any] = {name: None if math.isnan(value) else value for name, value in figures.items()}
    return judged(info | {"dram": _tier(result.dram), "disk": _tier(result.disk)}, goals)


def judged(info: Mapping[str, Any], goals: Goals) -> Evaluation:
    """What a simulation's figures, as they stand in an evaluation's `info`, are worth under some goals."""

    def figure(name: str) -> float:
        value = info[name]
        return math.nan if value is None else float(value)

    # Without an answer of two tokens there is no time between tokens, and no limit that it could break.
    kept = {
        name: 0.0 if name.startswith("tpot") and math.isnan(figure(name)) else figure(name) for name in goals.limits
    }
    return Evaluation(
        (figure(goals.objective_names[0]), -figure("tokens_per_s"), figure("cost")),
        tuple(kept[name] - limit for name, limit in goals.limits.items()),
        info,
    )


def _tier(tier: TierResult) -> dict[str, float]:
    names = ("peak_bytes", "read_bytes", "written_bytes", "read_waited_s", "evicted_blocks", "expired_blocks")
    return {name: getattr(tier, name) for name in names}
