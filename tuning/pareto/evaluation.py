"""What an evaluation of a point says: objectives to be made small, constraints, and whatever else is to be kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuning.pareto.space import Point


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`objectives` are all minimised (give a throughput with a minus sign). `constraints` hold when at most 0, Optuna's
    way: for a limit on the first token's time, `ttft_s - limit_s`. `info` is kept beside them and must be JSON."""

    objectives: tuple[float, ...]
    constraints: tuple[float, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """What makes it worthless (a value that is no finite number); None when nothing does."""
        if all(math.isfinite(value) for value in (*self.objectives, *self.constraints)):
            return None
        return f"not finite: objectives {self.objectives}, constraints {self.constraints}"

    @property
    def is_feasible(self) -> bool:
        return self.failure is None and all(value <= 0 for value in self.constraints)


Evaluate = Callable[[Point], Evaluation]
"""Pure and deterministic: the same point gives the same evaluation, whoever asks and whenever."""
