"""What a tuning job found, as plain data: all that the report shows, and that is saved to make it again.

Money is in the currency of the price book. A number is finite, or None where nothing was seen; the dataclasses refuse
others with a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Literal

from tuning.pareto.space import Value
from tuning.report.facts import HardwareFacts, ModelFacts, PriceFacts, SearchFacts, TraceFacts


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting that the search chose values for: a key of every point."""

    name: str
    title: str
    """In words: "DRAM", "disk class"."""
    unit: str
    """ "GiB", "s"; empty for choices and counts."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What is to be made good. Values are as one reads them: a throughput is positive."""

    name: str
    title: str
    """In words: "mean time to first token"."""
    unit: str
    better: Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit that has to hold."""

    name: str
    """As a field of `Figures` where it is one, such as "ttft_p99_s": then its worst five minutes are shown too."""
    title: str
    unit: str
    limit: float
    kind: Literal["at_most", "at_least"] = "at_most"

    def miss(self, value: float) -> float:
        """By how much a value misses the limit, in its unit; 0 when it holds."""
        return max(0.0, value - self.limit if self.kind == "at_most" else self.limit - value)


@dataclass(frozen=True, slots=True)
class Bill:
    """What a deployment costs for an hour, all of its devices and the store."""

    gpu_per_hour: float
    dram_per_hour: float
    disk_per_hour: float
    gpus: int
    """Devices in `gpu_per_hour`, each a unit of the hardware profile."""

    @property
    def per_hour(self) -> float:
        return math.fsum((self.gpu_per_hour, self.dram_per_hour, self.disk_per_hour))


@dataclass(frozen=True, slots=True)
class Figures:
    """What the simulator says of one deployment, by the names of `tuning.simulator.summary`."""

    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    ttft_worst_window_s: float | None
    """Highest mean of the requests that arrived in one of the successive five minutes; so for `tpot` and `e2e`."""
    tpot_mean_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    tpot_worst_window_s: float | None
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    e2e_mean_s: float | None
    e2e_p50_s: float | None
    e2e_p99_s: float | None
    e2e_worst_window_s: float | None
    makespan_s: float | None
    requests_per_s: float | None
    output_tokens_per_s: float | None
    tokens_per_s: float | None
    completed_requests: float | None
    refused_requests: float | None
    prompt_tokens: float | None
    hit_tokens_device: float | None
    hit_tokens_dram: float | None
    hit_tokens_disk: float | None
    computed_tokens: float | None
    block_hit_ratio: float | None

    @classmethod
    def of_summary(cls, summary: Mapping[str, float | None]) -> Figures:
        """From `summarise`; what is not a finite number becomes None, and what is not shown is left.

        Raises:
            KeyError: a figure is not there.
        """
        return cls(**{field.name: _finite_or_none(summary[field.name]) for field in fields(cls)})

    def worst_window(self, name: str) -> float | None:
        """Mean in the worst five minutes of the latency that a figure belongs to: of "ttft_p99_s" that of the TTFT.
        None where there is none."""
        latency = name.split("_")[0]
        if latency not in ("ttft", "tpot", "e2e"):
            return None
        value: float | None = getattr(self, f"{latency}_worst_window_s")
        return value


@dataclass(frozen=True, slots=True)
class ReportedPoint:
    """A configuration that was simulated. `objectives` and `slo_values` in the order of the report's."""

    point: dict[str, Value]
    objectives: tuple[float, ...]
    slo_values: tuple[float, ...]
    on_front: bool
    bill: Bill
    figures: Figures


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A configuration that was not simulated, or whose simulation came to nothing."""

    point: dict[str, Value]
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The configuration that was chosen."""

    rule: str
    """By which rule, in words that follow "It is": "the cheapest configuration within the limits"."""
    chosen: int | None
    """Its place in `JobReport.points`; None when no point meets the limits."""
    closest: int | None
    """When there is none: the place of the point that misses the limits by least. None when none could be simulated."""


@dataclass(frozen=True, slots=True)
class HitCurve:
    """Hit ratio of a cache of one tier by its capacity."""

    capacity_gib: tuple[float, ...]
    block_hit_ratio: tuple[float, ...]
    ideal_block_hit_ratio: float
    """With room for everything."""
    policy: str
    """What is evicted, in words: "LRU, all blocks in one pool, service takes no time"."""


@dataclass(frozen=True, slots=True)
class TtlGroup:
    """A prefix subtree and how long its blocks are kept."""

    name: str
    blocks: int
    reuses: int
    """How often a block of it is used again in the trace, after whatever time."""
    hits: int
    """Of these, those within the TTL."""
    block_s: float
    """Block-seconds that are held: the storage that it takes."""
    ttl_s: float | None
    """None for no limit."""


@dataclass(frozen=True, slots=True)
class ReuseRatios:
    """Policies at an equal budget of storage: hits by all uses of blocks."""

    name: str
    """On what: "the same trace", "second half, TTLs from the first"."""
    lru: float
    uniform_ttl: float
    group_ttl: float
    group_ttl_in_pool: float
    """As the store does it: of what has not expired, the least recently used goes when the pool is full."""


@dataclass(frozen=True, slots=True)
class TtlPlanFacts:
    """TTLs by group, the rest first."""

    groups: tuple[TtlGroup, ...]
    budget_block_s: float | None
    """None for no limit."""
    method: str
    uniform_ttl_s: float | None
    """The one TTL for all that the same budget pays for; None for no limit."""
    comparisons: tuple[ReuseRatios, ...] = ()


@dataclass(frozen=True, slots=True)
class JobReport:
    """Everything. See the module for units and what is refused."""

    trace: TraceFacts
    model: ModelFacts
    hardware: HardwareFacts
    prices: PriceFacts
    search: SearchFacts
    axes: tuple[Axis, ...]
    objectives: tuple[Objective, Objective, Objective]
    """Latency, throughput and cost, in this order."""
    slos: tuple[Slo, ...]
    points: tuple[ReportedPoint, ...]
    """Evaluated ones, in the order of asking."""
    baseline: ReportedPoint | None
    """The fixed configuration to compare with; None where it cannot be had, and `warnings` say why."""
    baseline_title: str
    """In words: "fixed 1024 GiB of DRAM"."""
    choice: Choice
    skipped: tuple[LeftOut, ...]
    """By the search, since they promised nothing."""
    failed: tuple[LeftOut, ...]
    """Evaluated, without a result."""
    hit_curve: HitCurve | None
    """None without reuse information, and so the next."""
    ttl_plan: TtlPlanFacts | None
    warnings: tuple[str, ...]
    """What whoever reads the figures must know, of this job in particular."""
    command: str
    """The command line."""
    versions: dict[str, str]
    """By name: of the project, Python, optuna, and the formats of files."""
    created: str
    """Date and time with the zone, ISO 8601."""

    def __post_init__(self) -> None:
        _require_finite(self, "")
        names = {axis.name for axis in self.axes}
        everyone = [*self.points, *([self.baseline] if self.baseline is not None else [])]
        for each in everyone:
            if len(each.objectives) != len(self.objectives) or len(each.slo_values) != len(self.slos):
                raise ValueError(
                    f"point {each.point} has {len(each.objectives)} objectives and {len(each.slo_values)} values for "
                    f"limits; {len(self.objectives)} and {len(self.slos)} are needed"
                )
        for point in (*(each.point for each in everyone), *(each.point for each in (*self.skipped, *self.failed))):
            if point.keys() != names:
                raise ValueError(f"point {point} must have just the keys of the axes: {', '.join(sorted(names))}")
        for name, place in (("chosen", self.choice.chosen), ("closest", self.choice.closest)):
            if place is not None and not 0 <= place < len(self.points):
                raise ValueError(f"choice.{name}={place} is not allowed: there are {len(self.points)} points, from 0")
        if self.hit_curve is not None and len(self.hit_curve.capacity_gib) != len(self.hit_curve.block_hit_ratio):
            raise ValueError("hit_curve: capacities and ratios must be equally many")

    def meets_slos(self, point: ReportedPoint) -> bool:
        """Whether all limits hold."""
        return not any(slo.miss(value) for slo, value in zip(self.slos, point.slo_values, strict=True))


def _finite_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _require_finite(value: object, place: str) -> None:
    """Of all that lies in it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}={value} is not allowed: give finite numbers, or None where nothing was seen")
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            _require_finite(item, f"{place}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _require_finite(item, f"{place}.{key}")
    elif is_dataclass(value):
        for field in fields(value):
            _require_finite(getattr(value, field.name), f"{place}.{field.name}" if place else field.name)
