"""Three small problems shaped like the choice of a cache's sizes, in closed form: to look at a search, not at a cache.

Objectives are the first token's time (s), the throughput with a minus sign (tokens/s) and the cost (a unit an hour).
A hit saves prefill, so it makes the first token sooner, lets more through and shortens the hours of the devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuning.pareto.evaluation import Evaluate, Evaluation
from tuning.pareto.space import NumericAxis, Point, SearchSpace

OBJECTIVES = ("ttft_s", "minus_tokens_per_s", "cost_per_hour")

_DRAM = NumericAxis("dram_gib", (0, 512, 1024, 1536, 2048), 16)
_DISK = NumericAxis("disk_gib", (0, 1024, 2048, 3072, 4096), 64)
_TTL = NumericAxis("ttl_s", (0, 600, 1200, 1800, 2400), 30)


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """What a search needs, and the uniform grid that it is judged by: `reference_counts` points along each axis."""

    space: SearchSpace
    evaluate: Evaluate
    reference_counts: tuple[int, ...]
    objective_names: tuple[str, ...] = OBJECTIVES
    constraint_names: tuple[str, ...] = ()


def _smooth(point: Point) -> Evaluation:
    """Diminishing returns of memory and of the time-to-live."""
    dram_gib, ttl_s = float(point["dram_gib"]), float(point["ttl_s"])
    hit_ratio = 0.7 * (1 - math.exp(-dram_gib / 450)) * (1 - math.exp(-ttl_s / 400))
    return _objectives(hit_ratio, 0.0, cost_per_hour=0.0028 * dram_gib)


def _knee(point: Point) -> Evaluation:
    """Hits grow with memory and disk together until the working set of 1,800 GiB fits; a disk is cheap, billed by
    terabytes begun, and its hits save half as much."""
    dram_gib, disk_gib, ttl_s = (float(point[name]) for name in ("dram_gib", "disk_gib", "ttl_s"))
    kept = min(1.0, ttl_s / 1500) ** 0.7
    in_dram = 0.75 * kept * min(1.0, dram_gib / 1800) ** 0.8
    in_both = 0.75 * kept * min(1.0, (dram_gib + disk_gib) / 1800) ** 0.8
    cost = 0.0028 * dram_gib + 0.0002 * disk_gib + 0.12 * math.ceil(disk_gib / 1024)
    return _objectives(in_dram, in_both - in_dram, cost_per_hour=cost)


def _cliff(point: Point) -> Evaluation:
    """Next to nothing until 1,330 GiB hold what is read in turn, and the time-to-live reaches over one turn of 1,000 s.
    Both must be there; longer or more is of no use."""
    dram_gib, ttl_s = float(point["dram_gib"]), float(point["ttl_s"])
    hit_ratio = 0.08 * min(1.0, dram_gib / 64) + (0.6 if dram_gib >= 1330 and ttl_s >= 1000 else 0.0)
    return _objectives(hit_ratio, 0.0, cost_per_hour=0.0028 * dram_gib)


def _objectives(dram_hits: float, disk_hits: float, cost_per_hour: float) -> Evaluation:
    """From hit ratios: prefill work that is left makes a queue that grows without a bound as it nears 1.15."""
    work = 1 - dram_hits - 0.5 * disk_hits
    ttft_s = 0.2 + 0.5 * work / (1.15 - work)
    return Evaluation((ttft_s, -1000 * (1 + 0.4 * (1 - work)), 10 * (1 - 0.2 * (1 - work)) + cost_per_hour))


PROBLEMS = {
    "smooth": SearchProblem(SearchSpace((_DRAM, _TTL)), _smooth, (10, 20)),
    "knee": SearchProblem(SearchSpace((_DRAM, _DISK, _TTL)), _knee, (4, 5, 10)),
    "cliff": SearchProblem(SearchSpace((_DRAM, _TTL)), _cliff, (10, 20)),
}
"""By name. The grids have 200 points; the coarse points of the search are none of their subsets."""
