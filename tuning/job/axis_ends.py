"""Where a chosen value is the last that was searched: what lies beyond the end of its axis nobody looked at."""

from __future__ import annotations

from tuning.deployment.deployment import Deployment
from tuning.pareto.space import NumericAxis, Point, SearchSpace

_LEAST = {"dram_gib": 0, "disk_gib": 0, "ttl_s": 0}
"""Below which there is nothing; of instances below 1."""


def values_at_ends(space: SearchSpace, point: Point, deployment: Deployment) -> list[str]:
    """What to say of the axes on whose ends a point lies. Ends that nothing can lie beyond are none: no memory, one
    instance, a time-to-live as long as the trace, which is no limit."""
    said = []
    for axis in space.axes:
        if not isinstance(axis, NumericAxis):
            continue
        value = point[axis.name]
        if value == axis.coarse[0] and value != _LEAST.get(axis.name, 1):
            said.append(f"{axis.name} {value} is the least that was searched: what less would do is not known")
        if value == axis.coarse[-1] and not (axis.name == "ttl_s" and deployment.ttl_s is None):
            said.append(f"{axis.name} {value} is the most that was searched: what more would do is not known")
    return said
