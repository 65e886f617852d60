from __future__ import annotations

import pytest

from actors.engine.stages import Stage, stages_of
from migrate.placement import Placement

HOME = Placement.at_home("h", 6, 2)


def test_everything_at_home_is_one_stage() -> None:
    assert stages_of(HOME) == (Stage("h", range(6)),)


@pytest.mark.parametrize(
    ("first", "count", "expected"),
    [
        (0, 2, [("x", 0, 2), ("h", 2, 6)]),
        (4, 2, [("h", 0, 4), ("x", 4, 6)]),
        (2, 3, [("h", 0, 2), ("x", 2, 5), ("h", 5, 6)]),
        (0, 6, [("x", 0, 6)]),
    ],
)
def test_layers_elsewhere_part_those_at_home(first: int, count: int, expected: list[tuple[str, int, int]]) -> None:
    stages = stages_of(HOME.with_layers_moved(first, count, "x"))
    assert [(stage.worker, stage.layers.start, stage.layers.stop) for stage in stages] == expected


def test_two_hosts_in_a_row_are_two_stages() -> None:
    placement = HOME.with_layers_moved(1, 2, "x").with_layers_moved(3, 1, "y")
    assert [(stage.worker, len(stage.layers)) for stage in stages_of(placement)] == [
        ("h", 1), ("x", 2), ("y", 1), ("h", 2),
    ]  # fmt: skip


def test_heads_elsewhere_part_no_layers() -> None:
    assert stages_of(HOME.with_heads_moved([3], [1], "x")) == (Stage("h", range(6)),)


def test_heads_elsewhere_of_a_layer_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layers \[3\] are not at home and have KV heads on another"):
        stages_of(HOME.with_layers_moved(3, 1, "x").with_heads_moved([3], [1], "h"))
