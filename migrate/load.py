"""What a worker reports about itself, and how it estimates its rates.

A report travels with every message of tokens, so an ingress always decides on figures as young as the last token it
got. Policies read reports; nothing here has a clock, so times come in as arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

Role = Literal["prefill", "decode", "monolithic"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)

SLOWEST_SAMPLE: Final = 2.0
"""A sample that is slower than this many times the estimate counts as this many times the estimate."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's own account of its work, addressed to one ingress. Immutable and picklable.

    The two `from_this_ingress_*` fields are the only ones that differ between the ingresses that get the report: an
    ingress counts its own work exactly, by its reservations, and everybody else's by `reported - from_this_ingress`.
    They cover requests that have not had their first token yet, which is as long as a reservation lasts; the message
    that carries a first token carries a report that no longer counts that request.

    Raises:
        ValueError: an unknown role, a negative count, or a rate that is not finite and above zero.
    """

    worker_id: str
    epoch: int
    """Grows with every restart of the worker. A report of another epoch than the roster's is to be refused."""
    role: Role
    total_blocks: int
    live_blocks: int
    """Blocks held by live requests. What can be taken at once is room, not load, and is not counted: cached blocks that
    nobody holds, and blocks of ended answers that are being stored."""
    running_requests: int
    waiting_requests: int
    pending_prefill_tokens: int
    """Uncached prompt tokens, queued or in progress, that are still to be computed."""
    prefill_tokens_per_s: float
    """Measured (`RateEstimate`); the configured prior as long as nothing was measured."""
    steps: int
    """Steps of the engine since it started. It only grows; standing still while requests wait means a hang."""
    from_this_ingress_prefill_tokens: int = 0
    """The part of `pending_prefill_tokens` that the reader of this report sent."""
    from_this_ingress_requests: int = 0
    """How many of the running and waiting requests the reader sent and has had no first token of."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; allowed are {', '.join(ROLES)}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} of worker {self.worker_id!r} is {value}; it must be 0 or more")
        if not (math.isfinite(self.prefill_tokens_per_s) and self.prefill_tokens_per_s > 0):
            raise ValueError(
                f"prefill_tokens_per_s of worker {self.worker_id!r} is {self.prefill_tokens_per_s}; it must be finite "
                "and above 0: report the configured prior until a rate was measured"
            )


_COUNTS: Final = (
    "epoch",
    "total_blocks",
    "live_blocks",
    "running_requests",
    "waiting_requests",
    "pending_prefill_tokens",
    "steps",
    "from_this_ingress_prefill_tokens",
    "from_this_ingress_requests",
)


class RateEstimate:
    """How fast a worker prefills, in tokens/s, or fetches, in bytes/s: an exponentially weighted mean of seconds per
    unit, weighted by units.

    It starts at a prior, which loses half of its weight with every `half_life` units measured. The mean is over
    *seconds per token*, because what dispatch wants to know is how long a number of tokens will take; and weighted by
    tokens, so that a chunk of 8 tokens says less than one of 2,048, and it does not matter into which steps a prompt is
    cut.

    The first steps of a fresh worker (pages not yet touched, kernels not yet compiled) can be a hundred times too slow,
    and an ingress that believed them would starve that worker. So a sample never counts as slower than `SLOWEST_SAMPLE`
    times the estimate: over one half-life the estimate can at most halve or double, in both directions (ours).

    Args:
        prior: units/s to start from.
        half_life: units after which old measurements have half their weight.

    Raises:
        ValueError: either argument is not finite and above zero.
    """

    def __init__(self, prior: float, half_life: float) -> None:
        for name, value in (("prior", prior), ("half_life", half_life)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; it must be finite and above 0")
        self._s_per_unit = 1.0 / prior
        self._half_life = half_life

    @property
    def per_s(self) -> float:
        """The estimate. Always finite and above zero."""
        return 1.0 / self._s_per_unit

    def update(self, amount: int, seconds: float) -> None:
        """Take in that `amount` units took `seconds`.

        Nothing done, or done in a time too short for the clock, says nothing about the rate and changes nothing.

        Raises:
            ValueError: a negative amount, or seconds that are negative or not finite.
        """
        if amount < 0:
            raise ValueError(f"amount is {amount}; it must be 0 or more")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds is {seconds}; it must be finite and 0 or more")
        if amount == 0 or seconds == 0:
            return
        kept = 0.5 ** (amount / self._half_life)
        sample = min(seconds / amount, SLOWEST_SAMPLE * self._s_per_unit)
        self._s_per_unit = kept * self._s_per_unit + (1.0 - kept) * sample
