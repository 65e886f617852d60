"""Which ends of axes are told."""

from __future__ import annotations

import pytest

from tuning.deployment.deployment import Deployment
from tuning.job.axis_ends import values_at_ends
from tuning.pareto.space import CategoricalAxis, NumericAxis, SearchSpace

SPACE = SearchSpace(
    (
        NumericAxis("dram_gib", (0, 512, 1024), 16),
        NumericAxis("disk_gib", (64, 128), 64),
        NumericAxis("ttl_s", (0, 300, 600), 60),
        NumericAxis("monolithic_instances", (1, 2, 3), 1),
        CategoricalAxis("eviction", ("lru", "lfu")),
    )
)


@pytest.mark.parametrize(
    ("values", "horizon_s", "told"),
    [
        ((16, 96, 60, 2, "lru"), 9e9, []),
        ((0, 96, 0, 1, "lfu"), 9e9, []),
        ((1024, 96, 60, 2, "lru"), 9e9, ["dram_gib 1024 is the most"]),
        ((512, 64, 60, 3, "lru"), 9e9, ["disk_gib 64 is the least", "monolithic_instances 3 is the most"]),
        ((512, 128, 600, 2, "lru"), 9e9, ["disk_gib 128 is the most", "ttl_s 600 is the most"]),
        ((512, 96, 600, 2, "lru"), 600, []),
    ],
)
def test_ends_are_told_where_something_can_lie_beyond(
    values: tuple[int | str, ...], horizon_s: float, told: list[str]
) -> None:
    point = dict(zip((axis.name for axis in SPACE.axes), values, strict=True))
    deployment = Deployment(disk_class="ssd").at(point, longest_ttl_s=horizon_s)
    said = values_at_ends(SPACE, point, deployment)
    assert [line.partition(" that was")[0] for line in said] == told
