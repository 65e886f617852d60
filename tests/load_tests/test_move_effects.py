"""By hand: two workers with six layers of 100 bytes and two KV heads; a block of one lane takes 10 bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from load_tests.move_effects import StepsAfter, freed, link_bytes, steps_after
from migrate.moves import HeadMove, LayerMove

OUT = LayerMove("a", 4, 2, "a", "b")
BACK = LayerMove("a", 4, 2, "b", "a")
HEADS = HeadMove("a", (0, 1, 2), (1,), "a", "b")


def state(
    weights: int,
    blocks: int,
    lanes: int,
    steps: list[int],
    hosted: Sequence[Any] = (),
    sent: int = 0,
) -> dict[str, Any]:
    return {
        "weight_bytes": weights,
        "pool_blocks": blocks,
        "kv_bytes": 10 * blocks * lanes,
        "layer_steps": steps,
        "hosted": list(hosted),
        "links": {"b": {"bytes_sent": sent}} if sent else {},
    }


def answer(a: Any, b: Any, a_has: dict[str, Any], heads: Any = (), b_has: dict[str, Any] | None = None) -> Any:
    return {
        "workers": {"a": {"state": a}, "b": {"state": b}},
        "placements": [
            {"instance": "a", "layers": a_has, "heads": list(heads)},
            {"instance": "b", "layers": b_has or {"b": list(range(6))}, "heads": []},
        ],
    }


AT_HOME = answer(state(600, 20, 12, [7] * 6), state(600, 20, 12, [9] * 6), {"a": list(range(6))})


def hosted(steps: int, kv_bytes: int = 4 * 40 * 10) -> list[dict[str, Any]]:
    return [{"instance": "a", "kv_bytes": kv_bytes, "layer_steps": {"4": steps, "5": steps}}]


def away(steps: int, hosted_steps: int) -> Any:
    a = state(400, 32, 8, [steps] * 4 + [7, 7], sent=5000)
    return answer(a, state(600, 10, 12, [9] * 6, hosted(hosted_steps)), {"a": [0, 1, 2, 3], "b": [4, 5]})


def test_layers_that_leave_free_their_weights_and_lanes() -> None:
    done = freed(OUT, AT_HOME, away(7, 0), layer_bytes=100, num_kv_heads=2)
    assert (done.weights_expected, done.weights) == (200, 200)
    # Twelve lanes of 20 blocks took 2,400 bytes. The eight that stayed have grown from 1,600 to 2,560, 200 of it from
    # weights; the last 40 are not enough for another block of each.
    assert (done.kv_expected, done.kv) == (800, 760)
    assert link_bytes(OUT, AT_HOME, away(7, 0)) == 5000


def test_layers_that_another_instance_runs_there_free_no_weights() -> None:
    b_has = {"b": [0, 1, 2, 3, 4], "a": [5]}
    before = answer(state(600, 20, 12, [7] * 6), state(500, 20, 10, [9] * 6), {"a": list(range(6))}, b_has=b_has)
    assert freed(OUT, before, before, layer_bytes=100, num_kv_heads=2).weights_expected == 100


def test_layers_that_go_home_free_what_their_host_had_for_them() -> None:
    done = freed(BACK, away(9, 2), AT_HOME, layer_bytes=100, num_kv_heads=2)
    assert (done.weights_expected, done.weights) == (0, 0)  # it runs its own layers 4 and 5
    assert (done.kv_expected, done.kv) == (1600, 1600)


def test_heads_free_their_lanes() -> None:
    part = {"worker": "b", "layers": [0, 1, 2], "heads": [1]}
    after = answer(state(600, 26, 9, [7] * 6), state(600, 12, 12, [9] * 6), {"a": list(range(6))}, [part])
    done = freed(HEADS, AT_HOME, after, layer_bytes=100, num_kv_heads=2)
    assert (done.weights_expected, done.weights, done.kv_expected, done.kv) == (0, 0, 600, 540)
    # And when these come back, of nine lanes at home and three elsewhere three are moved.
    back = HeadMove("a", (0, 1, 2), (1,), "b", "a")
    after["workers"]["b"]["state"]["hosted"] = [{"instance": "a", "kv_bytes": 780, "layer_steps": {}}]
    assert freed(back, after, AT_HOME, layer_bytes=100, num_kv_heads=2).kv_expected == 780


def test_who_runs_the_layers_afterwards() -> None:
    assert steps_after(OUT, away(7, 0), away(27, 20)) == StepsAfter(0, 40, 20)
    home_again = answer(state(600, 20, 12, [30] * 4 + [10, 10]), state(600, 20, 12, [9] * 6), {"a": list(range(6))})
    later = answer(state(600, 20, 12, [35] * 4 + [15, 15]), state(600, 20, 12, [9] * 6), {"a": list(range(6))})
    assert steps_after(BACK, home_again, later) == StepsAfter(0, 10, 5)
    assert steps_after(HEADS, AT_HOME, AT_HOME) == StepsAfter(None, None, 0)
