from __future__ import annotations

import pytest
import ray

from actors.control import object_store_bytes_of
from actors.object_store_room import GIB, needed_bytes, room_problem


def test_what_just_fits_is_no_problem() -> None:
    assert needed_bytes(4 * GIB, [GIB, 2 * GIB]) == 7 * GIB
    assert room_problem(7 * GIB, 4 * GIB, [GIB, 2 * GIB]) is None
    assert room_problem(7 * GIB - 1, 4 * GIB, [GIB, 2 * GIB]) is not None


def test_what_it_says_to_do_helps() -> None:
    longest = [GIB // 3, GIB // 7]
    problem = room_problem(5 * GIB, 6 * GIB, longest)
    assert problem is not None
    enough = int(problem.split("--object-store-memory ")[1].split()[0])
    assert room_problem(enough, 6 * GIB, longest) is None
    dram_gib = float(problem.split("store.dram_gib to ")[1].split()[0])
    assert dram_gib > 4.5
    assert room_problem(5 * GIB, int(dram_gib * GIB), longest) is None


def test_no_dram_tier_is_small_enough_where_requests_alone_fill_the_store() -> None:
    problem = room_problem(GIB, GIB, [2 * GIB])
    assert problem is not None
    assert "store.dram_gib to 0 or less" in problem


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_the_size_of_a_nodes_object_store() -> None:
    assert object_store_bytes_of(ray.get_runtime_context().get_node_id()) == 600 * 1024 * 1024
    assert object_store_bytes_of("nobody") is None
