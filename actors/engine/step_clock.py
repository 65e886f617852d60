"""What steps take, by what is in them: for whoever predicts what a step elsewhere would take."""

from __future__ import annotations

from typing import Final

from actors.engine.step_plan import StepPlan
from migrate.step_times import StepTimes

_WARM_UP_STEPS: Final = 16
"""Of a fresh engine: its pages were not touched, nor its kernels compiled. They can take a hundred times as long."""


class StepClock:
    """Counts the steps of one engine that it ran alone."""

    def __init__(self, *, waits_in_layers: bool) -> None:
        """`waits_in_layers`: layers are done when they return. On a GPU they are waited for when tokens are sampled:
        then all of a step is taken for its layers'."""
        self.times = StepTimes()
        self._waits_in_layers = waits_in_layers
        self._num_steps = 0

    def count(self, plan: StepPlan, sampled_rows: int, duration_s: float, head_s: float) -> None:
        """A step that has ended well; `head_s` of its duration went by after its layers."""
        self._num_steps += 1
        if self._num_steps <= _WARM_UP_STEPS:
            return
        prefill_pairs = sum(
            chunk.num_tokens * chunk.first_token + chunk.num_tokens * (chunk.num_tokens + 1) // 2
            for chunk in plan.prefills
        )
        self.times.count(
            prefill_tokens=sum(chunk.num_tokens for chunk in plan.prefills),
            decode_rows=len(plan.decodes),
            prefill_pairs=prefill_pairs,
            decode_pairs=sum(chunk.first_token + 1 for chunk in plan.decodes),
            layers_s=max(0.0, duration_s - head_s) if self._waits_in_layers else duration_s,
        )
        if self._waits_in_layers:
            self.times.count_head(sampled_rows, head_s)
