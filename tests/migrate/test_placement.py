from __future__ import annotations

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.placement import Placement

HOME = Placement.at_home("h", 6, 4)


def test_at_home_everything_is_on_one_worker() -> None:
    assert HOME.is_home
    assert (HOME.num_layers, HOME.num_kv_heads, HOME.version) == (6, 4, 0)
    assert HOME.layers_on("h") == (0, 1, 2, 3, 4, 5)
    assert HOME.lanes_on("h") == tuple((layer, head) for layer in range(6) for head in range(4))
    assert HOME.local_heads(3, "h") == (0, 1, 2, 3)
    assert HOME.layers_on("x") == ()
    assert HOME.lanes_on("x") == ()
    assert HOME.local_heads(3, "x") == ()
    assert HOME.workers() == {"h"}


def test_layers_take_weights_and_lanes_along() -> None:
    moved = HOME.with_layers_moved(2, 3, "x")
    assert moved.layers_on("x") == (2, 3, 4)
    assert moved.layers_on("h") == (0, 1, 5)
    assert moved.lanes_on("x") == tuple((layer, head) for layer in (2, 3, 4) for head in range(4))
    assert moved.local_heads(2, "h") == ()
    assert moved.local_heads(1, "h") == (0, 1, 2, 3)
    assert moved.workers() == {"h", "x"}
    assert (moved.version, moved.is_home) == (1, False)


def test_heads_move_without_the_weights() -> None:
    moved = HOME.with_heads_moved([5, 1], [2, 3], "x")
    assert moved.layers_on("h") == (0, 1, 2, 3, 4, 5)
    assert moved.lanes_on("x") == ((1, 2), (1, 3), (5, 2), (5, 3))
    assert moved.local_heads(1, "h") == (0, 1)
    assert moved.local_heads(2, "h") == (0, 1, 2, 3)
    assert (moved.version, moved.is_home) == (1, False)


def test_the_original_is_untouched_and_moves_pile_up() -> None:
    layers = HOME.with_layers_moved(0, 2, "x")
    both = layers.with_heads_moved([0], [3], "y").with_heads_moved([4], [0], "x")
    assert HOME.is_home
    assert layers.lanes_on("y") == ()
    assert both.version == 3
    # The weights of layer 0 are on x; one of its heads is on y, and x has a head of home's layer 4.
    assert both.lanes_on("y") == ((0, 3),)
    assert both.lanes_on("x") == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (4, 0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        HOME.version = 9  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(both)) == both


def test_a_layer_that_moves_gathers_its_lanes_and_brings_them_home() -> None:
    scattered = HOME.with_heads_moved([2], [0], "y").with_heads_moved([2], [3], "z").with_layers_moved(2, 1, "x")
    assert scattered.lanes_on("x") == tuple((2, head) for head in range(4))
    home = scattered.with_layers_moved(2, 1, "h")
    assert home.is_home
    assert home.version == 4


def test_heads_come_back_by_moving_to_the_weights() -> None:
    moved = HOME.with_heads_moved(range(6), [1, 2], "x")
    assert moved.with_heads_moved([0], [2], "h").local_heads(0, "x") == (1,)
    back = moved.with_heads_moved(range(6), [1, 2], "h")
    assert back.is_home
    assert back.version == 2


def test_a_run_may_grow_at_its_ends() -> None:
    moved = HOME.with_layers_moved(2, 1, "x").with_layers_moved(3, 2, "x").with_layers_moved(1, 1, "x")
    assert moved.layers_on("x") == (1, 2, 3, 4)
    heads = HOME.with_heads_moved([0], [1], "x").with_heads_moved([0], [2], "x")
    assert heads.local_heads(0, "x") == (1, 2)


@pytest.mark.parametrize(("first", "count"), [(-1, 2), (0, 0), (5, 2), (6, 1), (2, -1)])
def test_layers_that_do_not_exist_cannot_move(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"layers 0 to 5"):
        HOME.with_layers_moved(first, count, "x")


def test_a_guest_has_one_run_of_layers() -> None:
    moved = HOME.with_layers_moved(0, 2, "x")
    with pytest.raises(ValueError, match=r"'x' has the layers \[0, 1, 4\].*one contiguous run"):
        moved.with_layers_moved(4, 1, "x")
    with pytest.raises(ValueError, match="one contiguous run"):
        HOME.with_layers_moved(1, 3, "x").with_layers_moved(2, 1, "h")


@pytest.mark.parametrize(
    ("layers", "heads", "message"),
    [
        ([], [0], r"layers \[\]"),
        ([6], [0], r"allowed are some of 0 to 5"),
        ([-1], [0], r"allowed are some of 0 to 5"),
        ([0], [], r"at least one head"),
        ([0], [0, 2], r"contiguous ascending run"),
        ([0], [1, 0], r"contiguous ascending run"),
        ([0], [3, 4], r"KV heads 0 to 3"),
        ([0], [-1, 0], r"KV heads 0 to 3"),
        ([0], [0, 1, 2, 3], r"layer 0 has its weights on 'h' but no lane there"),
    ],
)
def test_head_moves_that_cannot_be_are_refused(layers: list[int], heads: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HOME.with_heads_moved(layers, heads, "x")


def test_a_guest_has_one_run_of_heads_in_a_layer() -> None:
    moved = HOME.with_heads_moved([1], [0], "x")
    with pytest.raises(ValueError, match=r"'x' has the heads of layer 1 \[0, 2\]"):
        moved.with_heads_moved([1], [2], "x")
    assert moved.with_heads_moved([1], [2], "y").local_heads(1, "h") == (1, 3)


def test_a_model_with_one_kv_head_says_why_it_cannot_be_split() -> None:
    single = Placement.at_home("h", 6, 1)
    with pytest.raises(ValueError, match=r"one KV head.*move layers instead"):
        single.with_heads_moved([0], [0], "x")
    assert single.with_layers_moved(0, 1, "x").lanes_on("x") == ((0, 0),)


def test_a_move_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'h' already"):
        HOME.with_layers_moved(0, 3, "h")
    with pytest.raises(ValueError, match="'h' already"):
        HOME.with_heads_moved([0], [0], "h")


@pytest.mark.parametrize(
    ("layers", "lanes", "message"),
    [
        ((), (), "number of layers, 1 or more"),
        (("h", "h"), (("h",),), "2 layers have a worker for their weights and 1 have lanes"),
        (("h",), ((),), "1 or more"),
        (("h", "h"), (("h",), ("h", "h")), "the same number"),
        (("h",), (("x",),), "no lane there"),
        (("x", "h", "x"), (("x",), ("h",), ("x",)), "one contiguous run"),
    ],
)
def test_a_placement_made_by_hand_is_checked_too(
    layers: tuple[str, ...], lanes: tuple[tuple[str, ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Placement("h", layers, lanes)


def test_a_model_without_layers_or_heads_is_refused() -> None:
    for num_layers, num_kv_heads in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            Placement.at_home("h", num_layers, num_kv_heads)


@dataclasses.dataclass(frozen=True)
class Move:
    """`count` layers from `first` on, or in `layers` the heads from `first` on."""

    to: str
    first: int
    count: int
    layers: frozenset[int] | None = None

    def apply(self, placement: Placement) -> Placement:
        if self.layers is None:
            return placement.with_layers_moved(self.first, self.count, self.to)
        return placement.with_heads_moved(self.layers, range(self.first, self.first + self.count), self.to)


WORKERS = "hxyz"
MOVES = st.one_of(
    st.builds(Move, st.sampled_from(WORKERS), st.integers(0, 5), st.integers(1, 6)),
    st.builds(
        Move,
        st.sampled_from(WORKERS),
        st.integers(0, 3),
        st.integers(1, 3),
        st.frozensets(st.integers(0, 5), min_size=1),
    ),
)


@given(st.lists(MOVES, max_size=12))
def test_whatever_moves_every_layer_and_lane_is_in_one_place(moves: list[Move]) -> None:
    """Against plain dictionaries from layer and lane to worker; a refused move must leave the placement as it was."""
    placement = HOME
    weights = dict.fromkeys(range(6), "h")
    lanes = {(layer, head): "h" for layer in range(6) for head in range(4)}
    version = 0
    for move in moves:
        try:
            placement = move.apply(placement)
        except ValueError:
            pass
        else:
            version += 1
            run = range(move.first, move.first + move.count)
            if move.layers is None:
                weights |= dict.fromkeys(run, move.to)
                lanes |= {(layer, head): move.to for layer in run for head in range(4)}
            else:
                lanes |= {(layer, head): move.to for layer in move.layers for head in run}
        assert placement.version == version
        for worker in WORKERS:
            assert placement.layers_on(worker) == tuple(layer for layer in range(6) if weights[layer] == worker)
            assert placement.lanes_on(worker) == tuple(lane for lane in sorted(lanes) if lanes[lane] == worker)
            if worker != "h" and placement.layers_on(worker):
                on_guest = placement.layers_on(worker)
                assert on_guest == tuple(range(on_guest[0], on_guest[0] + len(on_guest)))
        for layer in range(6):
            assert placement.local_heads(layer, weights[layer]), "the worker with the weights keeps a lane"
        everywhere = {"h", *weights.values(), *lanes.values()}
        assert placement.workers() == everywhere
        assert placement.is_home == (everywhere == {"h"})


def test_what_lost_workers_had_goes_home() -> None:
    placement = Placement.at_home("home", 5, 4).with_layers_moved(1, 2, "a").with_layers_moved(3, 1, "b")
    placement = placement.with_heads_moved([0, 4], [2, 3], "a").with_heads_moved([4], [0], "c")
    after = placement.with_all_home_from(["a", "c", "nobody"])
    assert after.version == placement.version + 1
    assert after.workers() == {"home", "b"}
    assert after.layers_on("b") == (3,)
    assert after.with_all_home_from(["b"]).is_home
    with pytest.raises(ValueError, match="must change the placement"):
        after.with_all_home_from(["a"])
