from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.moves_there_and_back import Movable, rounds, there_and_back
from migrate.moves import HeadMove, LayerMove
from migrate.placement import Placement


@given(workers=st.integers(2, 4), layers=st.integers(2, 30), heads=st.integers(1, 8), pairs=st.integers(1, 30))
def test_each_move_can_be_made_when_its_turn_comes_and_all_end_at_home(
    workers: int, layers: int, heads: int, pairs: int
) -> None:
    names = [f"w{number}" for number in range(workers)]
    placements = {name: Placement.at_home(name, layers, heads) for name in names}
    moves = there_and_back(Movable(tuple(names), layers, heads), 2 * pairs)
    assert len(moves) == 2 * pairs
    for move in moves:
        placements[move.instance] = move.after(placements[move.instance])  # which refuses what cannot be
    assert all(placement.is_home for placement in placements.values())
    if heads == 1:
        assert all(isinstance(move, LayerMove) for move in moves)


def test_fifty_moves_of_two_workers_are_mixed() -> None:
    moves = there_and_back(Movable(("decode", "prefill"), 30, 3), 50)
    out = [move for move in moves if move.source == move.instance]
    for kind in (LayerMove, HeadMove):
        for worker in ("decode", "prefill"):
            sizes = {len(move.layers) for move in out if isinstance(move, kind) and move.instance == worker}
            assert len(sizes) >= 3, (kind, worker)
    assert {move.heads for move in out if isinstance(move, HeadMove)} >= {(0,), (0, 1), (1, 2)}
    ends = {move.layers[0] == 0 for move in out if isinstance(move, LayerMove)}
    assert ends == {True, False}


def test_in_a_round_everybody_hosts_the_one_before() -> None:
    for out, back in itertools.islice(rounds(Movable(("a", "b", "c"), 8, 2)), 12):
        assert [(move.source, move.destination) for move in out] == [("a", "b"), ("b", "c"), ("c", "a")]
        assert [(move.source, move.destination) for move in back] == [("b", "a"), ("c", "b"), ("a", "c")]


def test_some_instances_and_a_few_layers_alone_may_move() -> None:
    moves = there_and_back(Movable(("a", "b", "c"), 30, 3, instances=("b",), most_layers=8), 40)
    assert {(move.instance, frozenset((move.source, move.destination))) for move in moves} == {("b", frozenset("bc"))}
    assert {type(move) for move in moves} == {LayerMove, HeadMove}
    assert max(len(move.layers) for move in moves) == 8


def test_what_cannot_move_is_refused() -> None:
    for count in (0, 3, -2):
        with pytest.raises(ValueError, match="even number"):
            there_and_back(Movable(("a", "b"), 8, 2), count)
    for workers, layers in ((("a",), 8), (("a", "b"), 1)):
        with pytest.raises(ValueError, match="at least two"):
            Movable(workers, layers, 2)
    with pytest.raises(ValueError, match=r"of \['c'\] something is to move"):
        Movable(("a", "b"), 8, 2, instances=("c",))
    with pytest.raises(ValueError, match="up to 0 layers"):
        Movable(("a", "b"), 8, 2, most_layers=0)
