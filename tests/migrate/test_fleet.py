from __future__ import annotations

import pytest

from migrate.fleet import Fleet
from migrate.placement import Placement
from tests.migrate.fleets import at_home, fleet, model, worker

COST = model()


def test_weights_of_like_instances_are_counted_once() -> None:
    # b has its own four layers, and hosts two of a's with the same weights. a keeps two layers.
    split = fleet(COST, worker("a"), worker("b"), placed=(at_home("a", COST).with_layers_moved(2, 2, "b"),))
    assert (split.kv_bytes("a"), split.kv_bytes("b")) == (18_000, 16_000)
    # c has sent its own layer 0 away, and hosts nothing.
    away = fleet(COST, worker("b"), worker("c"), placed=(at_home("c", COST).with_layers_moved(0, 1, "b"),))
    assert (away.kv_bytes("b"), away.kv_bytes("c")) == (16_000, 17_000)


def test_a_worker_keeps_what_it_granted_and_room_for_its_own() -> None:
    # b: 16 lanes of its own with 40 live blocks, and a quarter more: 8,000 bytes. Four lanes of a, whose 80 blocks are
    # granted, live or not: 3,200 bytes.
    placed = at_home("a", COST).with_layers_moved(3, 1, "b")
    workers = [worker("a", total_blocks=80, live_blocks=10), worker("b", live_blocks=40)]
    assert fleet(COST, *workers, placed=(placed,)).free_bytes("b", headroom=1.25) == 16_000 - 8000 - 3200
    assert fleet(COST, *workers, placed=(placed,)).live_bytes("b") == 40 * 160 + 10 * 40


def test_everything_is_told_once() -> None:
    placed = Placement.at_home("a", 4, 4)
    with pytest.raises(ValueError, match="twice"):
        Fleet.of([worker("a")], [placed, placed], COST)
    with pytest.raises(ValueError, match="twice"):
        Fleet.of([worker("a"), worker("a")], [placed], COST)
    with pytest.raises(ValueError, match="no placement"):
        Fleet.of([worker("a"), worker("b")], [placed], COST)
    with pytest.raises(ValueError, match="must be the same"):
        Fleet.of([worker("a")], [Placement.at_home("a", 4, 2)], COST)
