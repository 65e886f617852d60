"""Points of a search, simulated on a trace."""

from __future__ import annotations

from dataclasses import dataclass

from kv.policy.policy_file import PolicySpec
from tuning.deployment.deployment import Deployment, ServingOptions, simulation_settings
from tuning.deployment.objectives import Goals, judge
from tuning.hardware_profile import HardwareProfile
from tuning.model_shape import ModelShape
from tuning.pareto.evaluation import Evaluation
from tuning.pareto.space import Point
from tuning.price_book import PriceBook
from tuning.simulator.simulation import simulate
from tuning.timing import Timing
from tuning.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class DeploymentEvaluator:
    """`evaluate` of `tuning.pareto.search.run_search`: pure, remembers nothing, can be sent to other processes."""

    trace: Trace
    model: ModelShape
    hardware: HardwareProfile
    prices: PriceBook
    fixed: Deployment
    """What no axis opens."""
    options: ServingOptions
    goals: Goals

    def __call__(self, point: Point) -> Evaluation:
        """Raises ValueError: a value is not allowed, or has no price."""
        return self.evaluate(self.deployment(point))

    def deployment(self, point: Point) -> Deployment:
        """What a point stands for, see `Deployment.at`."""
        return self.fixed.at(point, longest_ttl_s=float(self.trace.arrival_s[-1]))

    def evaluate(self, deployment: Deployment, policy: PolicySpec | None = None) -> Evaluation:
        """Simulates a deployment, with `policy` in the place of its own if one is given.

        Raises:
            ValueError: a value is not allowed, or has no price; the weights leave no room for KV.
        """
        settings = simulation_settings(deployment, self.hardware, self.prices, self.options, policy)
        result = simulate(self.trace, Timing(self.model, self.hardware), settings)
        return judge(result, deployment, self.hardware, self.prices, self.goals)
