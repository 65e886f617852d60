"""Where a deployment is too small for its trace: what it makes of latencies then says how long the trace is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SHARE: Final = 0.05
"""Of the trace's length (ours): who is done later by more than that, with as long a mean wait, has a queue that grows.
Of what arrives in a second that is a tenth more than is served."""


def falls_behind(span_s: float, figures: Mapping[str, Any]) -> list[str]:
    """What to say of a deployment whose queue grows as long as requests arrive; nothing of others.

    Args:
        span_s: from the first arrival to the last.
        figures: of its simulation, as `SimulationResult.summary` names them.
    """
    ttft_s, makespan_s = figures["ttft_mean_s"], figures["makespan_s"]
    if not span_s or ttft_s is None or ttft_s <= SHARE * span_s or makespan_s <= (1 + SHARE) * span_s:
        return []
    return [
        f"this deployment falls behind: requests that arrive within {span_s:,.0f} s keep it busy for {makespan_s:,.0f} "
        f"s and wait {ttft_s:,.0f} s on average for the first token. A longer trace would make that longer, so these "
        "times are no prediction: give more instances, or a smaller --rate-factor"
    ]
